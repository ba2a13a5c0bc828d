"""Rounds that overlap, in virtual time: the same work sooner, and nothing lost to faults."""

import pytest
from msgspec.structs import replace

from hypergpu.ids import NodeId
from hypergpu.jobfile import with_strategy
from hypergpu.jobfile.spec import JobSpec, Outer, TrainingSettings
from netsim.link import COORDINATOR_LINK, Shape
from netsim.network.world import NodeDescription, WorldDescription
from netsim.virtual.worlds import DrawnFaults, SimulatedWorld
from tests.simulation.test_planned_worlds import JOB, run_to_end, world

STATED = JobSpec(
    workload="digits-softmax",
    outer=Outer(momentum=0.5),
    training=TrainingSettings(rounds=20, inner_steps=20, batch_size=8, nodes=6),
)
BOTH = pytest.mark.parametrize("strategy", ["diloco", "aware"])
FAULTS = DrawnFaults(
    link_cut_ms=20_000,
    node_crash_ms=20_000,
    coordinator_crash_ms=6_000,
    drain_ms=60_000,
    worker_death=0.05,
    away_ms=4_000,
)


def job(strategy: str, overlap: str) -> JobSpec:
    eager = replace(STATED, round=replace(STATED.round, overlap=overlap))
    return with_strategy(eager, strategy)


def alike(spec: JobSpec) -> SimulatedWorld:
    """Six nodes with the same line, whose bytes take about as long as ten of their steps."""
    line = replace(COORDINATOR_LINK.up, delay_us=40_000, bits_per_s=8_000_000)
    nodes = tuple(
        NodeDescription(
            name=NodeId(f"node-{number}"),
            group="far",
            shape=Shape(link=replace(COORDINATOR_LINK, up=line, down=line)),
            step_floor_ms=100,
        )
        for number in range(6)
    )
    far = WorldDescription(name="far", seed=1, coordinator=COORDINATOR_LINK, nodes=nodes)
    return replace(world(spec, 1), step_ms=(1, 1), description=far)


def test_stated_rounds_are_shorter_by_the_half_that_was_begun_early() -> None:
    waiting = run_to_end(alike(job("diloco", "none"))).round_ms[JOB]
    eager = run_to_end(alike(job("diloco", "eager"))).round_ms[JOB]
    # The first round begins with nothing, and in the second all lines are as they stay.
    assert [before - after for before, after in zip(waiting, eager, strict=True)][1:] == (
        [10 * 100] * 19
    )


def test_planned_rounds_that_overlap_wait_less() -> None:
    waiting, eager = (run_to_end(alike(job("aware", overlap))) for overlap in ("none", "eager"))
    assert eager.virtual_ms < 0.85 * waiting.virtual_ms


@BOTH
@pytest.mark.parametrize("seed", range(4))
def test_crashes_and_cuts_while_rounds_overlap_end_the_job(strategy: str, seed: int) -> None:
    run_to_end(replace(world(job(strategy, "eager"), seed), faults=FAULTS))


def test_a_coordinator_that_is_killed_again_and_again_comes_to_the_same_model() -> None:
    spec = job("diloco", "eager")
    undisturbed = run_to_end(alike(spec))
    killed = run_to_end(
        replace(alike(spec), faults=DrawnFaults(coordinator_crash_ms=3_000, away_ms=500))
    )
    assert killed.models == undisturbed.models

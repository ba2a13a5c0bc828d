"""Jobs that plan their rounds by what they measure, in virtual time."""

from statistics import median

import pytest
from msgspec.structs import replace

from coordinator.core.job.state import Phase
from hypergpu.ids import JobId, NodeId
from hypergpu.jobfile import with_strategy
from hypergpu.jobfile.spec import Aware, JobSpec, TrainingSettings
from netsim.link import COORDINATOR_LINK, Shape
from netsim.network.world import NodeDescription, WorldDescription
from netsim.virtual.simulation import Simulation, WorldOutcome
from netsim.virtual.sizes import TransferSizes
from netsim.virtual.worlds import DrawnFaults, SimulatedWorld

SCHEMES = {
    "fp32": 4_000_000,
    "bf16": 2_000_000,
    "int8": 1_000_000,
    "int4": 510_000,
    "topk256": 130_000,
    "topk64": 30_000,
    "topk16": 8_000,
}
STATED = JobSpec(
    workload="digits-softmax",
    training=TrainingSettings(rounds=20, inner_steps=20, batch_size=8, nodes=6),
)
AWARE = with_strategy(STATED, "aware")
JOB = JobId("job-0")


def world(spec: JobSpec, seed: int) -> SimulatedWorld:
    """Six nodes on drawn links, the slowest eight times slower than the fastest."""
    return SimulatedWorld(
        seed=seed,
        nodes=6,
        jobs=(spec,),
        sizes=TransferSizes(SCHEMES["int4"], SCHEMES["int4"], SCHEMES["fp32"], SCHEMES),
        step_ms=(50, 400),
    )


def run_to_end(described: SimulatedWorld) -> WorldOutcome:
    outcome = Simulation(described).run()
    assert outcome.violations == ()
    assert outcome.phases == {JOB: Phase.FINISHED}
    return outcome


@pytest.mark.parametrize("seed", range(3))
def test_a_planned_job_does_the_same_work_much_sooner_where_nodes_differ(seed: int) -> None:
    stated, plan_round_now = run_to_end(world(STATED, seed)), run_to_end(world(AWARE, seed))
    assert plan_round_now.virtual_ms < 0.75 * stated.virtual_ms


@pytest.mark.parametrize("seed", range(3))
def test_a_coordinator_that_forgets_its_measurements_again_and_again_ends_the_job(
    seed: int,
) -> None:
    faults = DrawnFaults(coordinator_crash_ms=5_000, node_crash_ms=40_000, away_ms=4_000)
    run_to_end(replace(world(AWARE, seed), faults=faults))


@pytest.mark.parametrize("seed", range(3))
def test_nodes_that_are_killed_again_and_again_and_start_slowly_end_the_job(seed: int) -> None:
    faults = DrawnFaults(node_crash_ms=20_000, away_ms=3_000, starting_ms=8_000)
    slowly = run_to_end(replace(world(AWARE, seed), faults=faults))
    at_once = run_to_end(replace(world(AWARE, seed), faults=replace(faults, starting_ms=0)))
    assert run_to_end(replace(world(AWARE, seed), faults=faults)) == slowly
    assert slowly.journals != at_once.journals


def test_the_strategies_differ_in_what_they_move_and_wait_for() -> None:
    short = replace(STATED, training=replace(STATED.training, rounds=4))
    took_ms = {
        strategy: run_to_end(world(with_strategy(short, strategy), 1)).virtual_ms
        for strategy in ("fedavg", "diloco")
    }
    assert took_ms["fedavg"] > took_ms["diloco"]


STEP_MS = 1_000
EACH_STEP = replace(
    STATED, training=replace(STATED.training, rounds=60, inner_steps=1, batch_size=32)
)


def one_slow(spec: JobSpec) -> SimulatedWorld:
    """Six nodes next door, the last of them threefold slower than the others."""
    names = [NodeId(f"node-{number}") for number in range(6)]
    nodes = tuple(
        NodeDescription(
            name=name,
            group="near",
            shape=Shape(link=COORDINATOR_LINK),
            step_floor_ms=STEP_MS * (3 if name == names[-1] else 1),
        )
        for name in names
    )
    near = WorldDescription(name="near", seed=1, coordinator=COORDINATOR_LINK, nodes=nodes)
    return replace(world(spec, 1), step_ms=(1, 1), description=near)


def test_a_slow_node_holds_nobody_up_where_every_step_is_exchanged() -> None:
    aware = replace(with_strategy(EACH_STEP, "aware"), aware=Aware(inner_steps_max=1))
    stated, plan_round_now = run_to_end(one_slow(EACH_STEP)), run_to_end(one_slow(aware))
    stated_ms, planned_ms = (median(each.round_ms[JOB]) for each in (stated, plan_round_now))
    # Everybody had a part in every round, and all batches together are as many samples as stated.
    assert plan_round_now.rounds == pytest.approx(stated.rounds, rel=0.1)
    assert planned_ms < 3 * STEP_MS < stated_ms
    assert planned_ms < 0.6 * stated_ms

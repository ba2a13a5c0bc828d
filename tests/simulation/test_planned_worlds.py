"""Jobs in virtual time that plan or overlap rounds, know their line, draw a first model."""

from statistics import median

import pytest
from msgspec.structs import replace

from coordinator.core.network.reading import StepTime, TransferDirection, TransferTime
from coordinator.core.training.job.state import Phase
from coordinator.core.training.plan.decision import PlanRequest, RoundPlan
from hypergpu.ids import JobId, NodeId, Slot
from hypergpu.jobfile.rules import with_strategy
from hypergpu.jobfile.spec import Aware, JobSpec, OuterSettings, TrainingSettings, Trust
from hypergpu.units import Bytes, Microseconds, Milliseconds, Samples
from netsim.link import COORDINATOR_LINK, Shape
from netsim.network.world import NodeDescription, WorldDescription
from netsim.virtual.node_link import NodeMeasurements
from netsim.virtual.sharing import Agenda
from netsim.virtual.simulation import Simulation, WorldOutcome
from netsim.virtual.worlds import DrawnFaults, SimulatedWorld, TransferSizes

CODECS = {
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
        sizes=TransferSizes(CODECS["int4"], CODECS["int4"], CODECS["fp32"], CODECS),
        step_ms=(50, 400),
    )


def run_to_end(described: SimulatedWorld) -> WorldOutcome:
    outcome = Simulation(described).run()
    assert outcome.violations == ()
    assert outcome.phases == {JOB: Phase.FINISHED}
    return outcome


@pytest.mark.parametrize("seed", range(3))
def test_a_planned_job_does_the_same_work_much_sooner_where_nodes_differ(seed: int) -> None:
    stated_run, plan_round_now = run_to_end(world(STATED, seed)), run_to_end(world(AWARE, seed))
    sample_ms = [each.virtual_ms / each.samples[JOB] for each in (plan_round_now, stated_run)]
    assert sample_ms[0] < 0.75 * sample_ms[1]


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
    STATED,
    training=replace(STATED.training, rounds=60, inner_steps=1, batch_size=32),
    # Pairs train the same samples: more rounds are needed for as many.
    trust=Trust(duplicates="none"),
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
    of_all = replace(EACH_STEP, round=replace(EACH_STEP.round, quorum=1.0))
    stated_run, plan_round_now = run_to_end(one_slow(of_all)), run_to_end(one_slow(aware))
    stated_ms, planned_ms = (median(each.round_ms[JOB]) for each in (stated_run, plan_round_now))
    # Everybody had a part in every round, and all batches together are as many samples as stated.
    assert plan_round_now.rounds == pytest.approx(stated_run.rounds, rel=0.1)
    assert planned_ms < 3 * STEP_MS < stated_ms
    assert planned_ms < 0.6 * stated_ms


OVERLAPPING_STATED = JobSpec(
    workload="digits-softmax",
    outer=OuterSettings(momentum=0.5),
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
    eager = replace(OVERLAPPING_STATED, round=replace(OVERLAPPING_STATED.round, overlap=overlap))
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
    waiting_ms = run_to_end(alike(job("diloco", "none"))).round_ms[JOB]
    eager = run_to_end(alike(job("diloco", "eager"))).round_ms[JOB]
    # The first round begins with nothing, and in the second all lines are as they stay.
    assert [before - after for before, after in zip(waiting_ms, eager, strict=True)][1:] == (
        [10 * 100] * 19
    )


def test_planned_rounds_that_overlap_wait_less() -> None:
    waiting_run, eager = (run_to_end(alike(job("aware", overlap))) for overlap in ("none", "eager"))
    # Both begin with a round of one step, and need a few more until their steps are known.
    assert eager.virtual_ms < 0.9 * waiting_run.virtual_ms


@BOTH
@pytest.mark.parametrize("seed", range(4))
def test_crashes_and_cuts_while_rounds_overlap_end_the_job(strategy: str, seed: int) -> None:
    run_to_end(replace(world(job(strategy, "eager"), seed), faults=FAULTS))


def test_a_coordinator_that_is_killed_again_and_again_comes_to_the_same_model() -> None:
    spec = job("diloco", "eager")
    undisturbed_run = run_to_end(alike(spec))
    killed_run = run_to_end(
        replace(alike(spec), faults=DrawnFaults(coordinator_crash_ms=3_000, away_ms=500))
    )
    assert killed_run.models == undisturbed_run.models


NODES = {NodeId("a"): Slot(0), NodeId("b"): Slot(1)}
SIZES = TransferSizes(whole=CODECS["fp32"], codecs=CODECS).for_plans()


def plan(line_bits_per_s: int) -> RoundPlan:
    """Two nodes that end together and upload at 10 Mbit/s each, where nobody is in their way."""
    measurements = NodeMeasurements(Agenda(), SIZES, seed=0, line_bits_per_s=line_bits_per_s)
    measurements.is_needed = True
    now_ms = Milliseconds(0)
    for node in NODES:
        measurements.note(node, StepTime(now_ms, 100, Milliseconds(10_000)))
        for way in TransferDirection:
            transfer = TransferTime(now_ms, way, Bytes(1_250_000), Microseconds(1_000_000), 4)
            measurements.note(node, transfer)
    work = Samples(1_000_000)
    return measurements.plan_round_now(PlanRequest(1, now_ms, AWARE, NODES, Samples(0), work), {})


def test_uploads_that_would_crowd_the_line_wait_for_each_other() -> None:
    first, second = sorted(part.upload_after_ms for part in plan(12_000_000).nodes.values())
    assert first == 0 < second


def test_nobody_waits_where_the_line_carries_all_or_has_no_limit() -> None:
    for line_bits_per_s in (0, 100_000_000):
        waits = {part.upload_after_ms for part in plan(line_bits_per_s).nodes.values()}
        assert waits == {0}


FIRST_SIZES = TransferSizes(model=510_000, update=510_000, whole=4_000_000)


def run_first_models(rounds: int) -> WorldOutcome:
    spec = JobSpec(
        workload="digits-softmax",
        training=TrainingSettings(rounds=rounds, inner_steps=5, batch_size=8, nodes=3),
    )
    world = SimulatedWorld(seed=4, nodes=3, jobs=(spec,), sizes=FIRST_SIZES)
    outcome = Simulation(world).run()
    assert outcome.violations == ()
    assert outcome.phases == {JOB: Phase.FINISHED}
    return outcome


def test_nobody_downloads_anything_in_round_0() -> None:
    assert [each.downloads_ms for each in run_first_models(1).transfers.values()] == [()] * 3


def test_from_round_1_on_every_node_downloads_what_came_after() -> None:
    assert [len(each.downloads_ms) for each in run_first_models(4).transfers.values()] == [3] * 3

import pytest
from msgspec.structs import replace

from hypergpu.jobfile.spec import JobSpec, RoundRule, TrainingSettings
from hypergpu.units import Milliseconds
from netsim.virtual.invariants import violations
from netsim.virtual.simulation import Simulation, WorldOutcome
from netsim.virtual.worlds import DrawnFaults, SimulatedWorld, calm_world, random_world
from tests.unit.job_states import training

SPEC = JobSpec(
    workload="digits-softmax",
    training=TrainingSettings(rounds=12, inner_steps=20, batch_size=8, nodes=4),
    round=RoundRule(deadline_ms=0),
)
STEADY = SimulatedWorld(seed=3, nodes=4, jobs=(SPEC,))


def run_to_end(world: SimulatedWorld) -> WorldOutcome:
    outcome = Simulation(world).run()
    assert outcome.violations == ()
    return outcome


@pytest.mark.parametrize("seed", range(40))
def test_a_world_full_of_faults_ends_every_job_without_breaking_an_invariant(seed: int) -> None:
    run_to_end(random_world(seed))


def test_the_same_seed_gives_the_same_journal() -> None:
    first, second = run_to_end(random_world(11)), run_to_end(random_world(11))
    assert first == second
    assert first.journals != run_to_end(random_world(12)).journals


@pytest.mark.parametrize("seed", range(5))
def test_a_coordinator_killed_again_and_again_ends_with_the_same_model(seed: int) -> None:
    undisturbed = run_to_end(replace(STEADY, seed=seed))
    faults = DrawnFaults(coordinator_crash_ms=2_000, away_ms=4_000)
    disturbed = run_to_end(replace(STEADY, seed=seed, faults=faults))
    assert disturbed.journals != undisturbed.journals
    assert disturbed.models == undisturbed.models


@pytest.mark.parametrize("seed", range(5))
def test_nodes_killed_and_back_in_time_end_with_the_same_model(seed: int) -> None:
    undisturbed = run_to_end(replace(STEADY, seed=seed))
    faults = DrawnFaults(node_crash_ms=10_000, link_cut_ms=10_000, away_ms=1_000)
    disturbed = run_to_end(replace(STEADY, seed=seed, faults=faults))
    assert disturbed.virtual_ms != undisturbed.virtual_ms
    assert disturbed.models == undisturbed.models


def test_a_job_that_cannot_start_is_reported_with_its_reason() -> None:
    spec = replace(SPEC, training=replace(SPEC.training, nodes=9))
    world = replace(STEADY, jobs=(spec,), limit_ms=Milliseconds(60_000))
    (violation,) = Simulation(world).run().violations
    assert violation == "never finished: job-0 is waiting (0 of 9 nodes are here)"


def test_the_checker_sees_a_sample_that_was_dropped() -> None:
    job = training()
    (stream,) = job.streams
    broken = replace(job, streams=(replace(stream, cursor=stream.cursor + 1),))
    assert violations(broken) == ("17 samples assigned, 16 held, 0 accepted",)


def test_a_hundred_nodes_share_a_job() -> None:
    assert run_to_end(calm_world(seed=1, nodes=100, rounds=3)).rounds == 3

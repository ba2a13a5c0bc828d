"""Worlds in virtual time whose jobs train on data that stay on nodes."""

import pytest
from msgspec.structs import replace

from hypergpu.jobfile.spec import Data, JobSpec, RoundRule, TrainingSettings
from netsim.virtual.simulation import Simulation
from netsim.virtual.worlds import DrawnFaults, SimulatedWorld, random_world

OWN = Data(source="node", name="wards", path="held-out")
SPEC = JobSpec(
    workload="digits-softmax",
    training=TrainingSettings(rounds=8, inner_steps=20, batch_size=8, nodes=4),
    round=RoundRule(quorum=1.0),
    data=OWN,
)
"""A job that needs every update waits for its coordinator."""


def on_own_data(world: SimulatedWorld) -> SimulatedWorld:
    return replace(world, jobs=tuple(replace(spec, data=OWN) for spec in world.jobs))


@pytest.mark.parametrize("seed", range(10))
def test_no_sample_of_one_node_is_ever_assigned_to_another_in_worlds_full_of_faults(
    seed: int,
) -> None:
    """Invariants look at every participant after every event, and every job ends."""
    outcome = Simulation(on_own_data(random_world(seed))).run()
    assert outcome.violations == ()


@pytest.mark.parametrize("seed", range(3))
def test_a_coordinator_killed_again_and_again_ends_with_the_model_of_an_undisturbed_one(
    seed: int,
) -> None:
    calm = SimulatedWorld(seed, 4, (SPEC,))
    killed_world = replace(calm, faults=DrawnFaults(coordinator_crash_ms=2_000, away_ms=4_000))
    undisturbed_run, disturbed_run = Simulation(calm).run(), Simulation(killed_world).run()
    assert undisturbed_run.journals != disturbed_run.journals
    assert undisturbed_run.models == disturbed_run.models
    assert undisturbed_run.violations == disturbed_run.violations == ()

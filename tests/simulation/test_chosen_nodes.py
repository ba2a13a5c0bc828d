"""Several jobs in virtual time that share nodes and require some of them."""

import pytest

from coordinator.core.training.job.state import Phase
from coordinator.core.work.work_events import NodeJoined
from hypergpu.ids import NodeId
from hypergpu.jobfile.spec import JobSpec, NodeSelection, TrainingSettings
from netsim.link import COORDINATOR_LINK, Shape
from netsim.network.world import NodeDescription, WorldDescription
from netsim.virtual.simulation import Simulation
from netsim.virtual.worlds import DrawnFaults, SimulatedWorld

GPUS, OTHERS = ("gpu-0", "gpu-1"), ("cpu-0", "cpu-1", "cpu-2")
TRAINING = TrainingSettings(rounds=12, inner_steps=10, batch_size=8)


def job(*labels: str, nodes_max: int = 0) -> JobSpec:
    selection = NodeSelection(max=nodes_max, labels=labels)
    return JobSpec(workload="digits-softmax", training=TRAINING, nodes=selection)


def world(seed: int, *jobs: JobSpec) -> SimulatedWorld:
    nodes = tuple(
        NodeDescription(
            name=NodeId(name),
            group="near",
            shape=Shape(link=COORDINATOR_LINK),
            features={"gpu": 8 * 10**9 if name in GPUS else 0, "region": "eu"},
        )
        for name in (*GPUS, *OTHERS)
    )
    near = WorldDescription(name="near", seed=seed, coordinator=COORDINATOR_LINK, nodes=nodes)
    faults = DrawnFaults(node_crash_ms=20_000, coordinator_crash_ms=30_000, away_ms=3_000)
    return SimulatedWorld(seed, len(nodes), jobs, faults, description=near)


@pytest.mark.parametrize("seed", range(3))
def test_jobs_that_share_nodes_end_with_none_that_they_cannot_have(seed: int) -> None:
    simulation = Simulation(world(seed, job(), job("gpu >= 4GB"), job("gpu = 0", nodes_max=1)))
    outcome = simulation.run()
    assert outcome.violations == ()
    assert set(outcome.phases.values()) == {Phase.FINISHED}
    members = [
        {event.node for event in journal if isinstance(event, NodeJoined)}
        for journal in simulation.journals.values()
    ]
    assert members[1] <= set(GPUS)
    assert members[2] <= set(OTHERS)
    assert all(members)


def test_a_job_that_no_node_fits_waits_and_keeps_none_from_others() -> None:
    simulation = Simulation(world(1, job(), job("region = us")))
    outcome = simulation.run()
    assert [*outcome.phases.values()] == [Phase.FINISHED, Phase.WAITING]
    assert [*outcome.reasons.values()][1] == "0 of 1 nodes are here"

"""What the first model of a job costs the nodes of a world: nothing."""

from coordinator.core.job.state import Phase
from hypergpu.ids import JobId
from hypergpu.jobfile.spec import JobSpec, TrainingSettings
from netsim.virtual.simulation import Simulation, WorldOutcome
from netsim.virtual.sizes import TransferSizes
from netsim.virtual.worlds import SimulatedWorld

SIZES = TransferSizes(model=510_000, update=510_000, whole=4_000_000)
JOB = JobId("job-0")


def run_to_end(rounds: int) -> WorldOutcome:
    spec = JobSpec(
        workload="digits-softmax",
        training=TrainingSettings(rounds=rounds, inner_steps=5, batch_size=8, nodes=3),
    )
    world = SimulatedWorld(seed=4, nodes=3, jobs=(spec,), sizes=SIZES)
    outcome = Simulation(world).run()
    assert outcome.violations == ()
    assert outcome.phases == {JOB: Phase.FINISHED}
    return outcome


def test_nobody_downloads_anything_in_round_0() -> None:
    assert [each.downloads_ms for each in run_to_end(1).transfers.values()] == [()] * 3


def test_from_round_1_on_every_node_downloads_what_came_after() -> None:
    assert [len(each.downloads_ms) for each in run_to_end(4).transfers.values()] == [3] * 3

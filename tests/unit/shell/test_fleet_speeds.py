"""Speeds as the coordinator remembers them: across jobs and restarts, by work, device and node."""

from pathlib import Path

import pytest
from msgspec.structs import replace

from coordinator.core.network.known_speed import DAYS_KEPT, SpeedRecord, SpeedSource, record_speed
from coordinator.core.network.progress import LeaseProgress
from coordinator.core.network.reading import Estimate
from coordinator.core.training.job.state import Job
from coordinator.shell.app.periodic_work import store_speeds
from coordinator.shell.kinds.training.speed_keys import speed_sources, workload_key
from coordinator.shell.nodes.control_stream import ControlStream
from coordinator.shell.nodes.fleet_speeds import (
    NODES_MOST,
    FleetSpeeds,
    device_key,
)
from coordinator.shell.nodes.readings import FinishedUpdate, Readings
from coordinator.shell.translate import Capabilities
from hypergpu.ids import Digest, JobId, NodeId
from hypergpu.jobfile.spec import Inner, JobSpec, TrainingSettings
from hypergpu.units import Milliseconds
from tests.unit.shell.whole_shell import JOB, NODE, driving, services_in

OTHER = NodeId("0x" + "b2" * 20)
MLP, CNN = SpeedSource("mlp", "card"), SpeedSource("cnn", "card")
HERE = Milliseconds(0)


class UnixClock:
    """Unix milliseconds that a test sets."""

    def __init__(self) -> None:
        self.now_ms = 1_790_000_000_000

    def __call__(self) -> Milliseconds:
        return Milliseconds(self.now_ms)


def finished_update(lease: int, source: SpeedSource | None, step_ms: int) -> FinishedUpdate:
    computing_ms, whole = Milliseconds(10 * step_ms), Milliseconds(20 * step_ms)
    return FinishedUpdate(JOB, lease, 10, computing_ms, Milliseconds(0), whole, source)


def step_us(readings: Readings, source: SpeedSource) -> float:
    return readings.readings([NODE], HERE, {NODE: source})[NODE].step_us.mean


def test_the_next_job_of_a_workload_begins_with_the_speed_of_the_last_one() -> None:
    readings = Readings()
    readings.record_accepted(NODE, finished_update(1, MLP, 200))
    readings.record_accepted(NODE, finished_update(2, CNN, 900))
    assert (step_us(readings, MLP), step_us(readings, CNN)) == (200_000, 900_000)
    assert step_us(readings, MLP._replace(workload="gpt")) == 0
    readings.record_accepted(NODE, finished_update(3, MLP, 200))
    assert step_us(readings, MLP) == 200_000


def test_another_device_or_version_of_a_node_begins_anew() -> None:
    readings = Readings()
    readings.record_accepted(NODE, finished_update(1, MLP, 200))
    assert step_us(readings, MLP._replace(device="cpu")) == 0


def test_a_speed_that_only_progress_showed_is_remembered_too() -> None:
    readings = Readings()
    for second in range(4):
        at_ms = Milliseconds(2_000 * second)
        readings.record_progress(NODE, LeaseProgress(JOB, 1, 1.0 + second, at_ms), MLP)
    again = Readings(speeds=readings.speeds)
    assert step_us(again, MLP) == 2_000_000


def test_what_nobody_can_name_is_not_remembered() -> None:
    readings = Readings()
    readings.record_accepted(NODE, finished_update(1, None, 200))
    assert readings.reading(NODE).step_us.mean == 200_000
    assert readings.speeds.records_to_store(9) == {}


async def test_speeds_outlive_a_restart(tmp_path: Path) -> None:
    services = services_in(tmp_path)
    services.readings.record_accepted(NODE, finished_update(1, MLP, 200))
    async with driving(services):
        await store_speeds(services.driver, services.readings.speeds)
    assert services.readings.speeds.records_to_store(9) == {}
    again = Readings(speeds=FleetSpeeds(services.journal.speeds()))
    assert step_us(again, MLP) == 200_000


async def test_a_node_that_was_not_measured_for_days_is_forgotten(tmp_path: Path) -> None:
    clock, services = UnixClock(), services_in(tmp_path)
    speeds = FleetSpeeds(clock=clock)
    services = services.replace(readings=Readings(speeds=speeds))
    services.readings.record_accepted(NODE, finished_update(1, MLP, 200))
    async with driving(services):
        await store_speeds(services.driver, services.readings.speeds)
        clock.now_ms += DAYS_KEPT * 86_400_000 + 1
        assert not speeds.recall(NODE, MLP).count
        speeds.forget_old()
        await store_speeds(services.driver, services.readings.speeds)
    assert services.journal.speeds() == {}


def test_so_many_nodes_are_remembered_and_the_one_measured_longest_ago_makes_room() -> None:
    known_estimate = Estimate(1_000.0, 10.0, 5)
    records = {
        NodeId(f"0x{number:040x}"): record_speed(
            SpeedRecord(), MLP, known_estimate, Milliseconds(NODES_MOST - number)
        )
        for number in range(NODES_MOST)
    }
    clock = UnixClock()
    clock.now_ms = NODES_MOST
    speeds = FleetSpeeds(records, clock)
    speeds.record(NODE, MLP, known_estimate)
    assert speeds.forgotten == {NodeId(f"0x{NODES_MOST - 1:040x}")}
    assert speeds.recall(NODE, MLP).count


def job(**changes: object) -> Job:
    spec = JobSpec(workload="digits-mlp", options={"width": 64, "depth": 2})
    return Job(job_id=JobId("job-1"), spec=replace(spec, **changes), layout=Digest("a"))


def test_a_speed_is_of_all_that_a_step_depends_on_and_of_nothing_else() -> None:
    same = job(name="again", options={"depth": 2, "width": 64}, inner=Inner(learning_rate=0.1))
    assert workload_key(same) == workload_key(job())
    others = [
        job(workload="digits-cnn"),
        job(options={"width": 65, "depth": 2}),
        job(training=TrainingSettings(batch_size=7)),
        job(inner=Inner(optimizer="sgd")),
        replace(job(), layout=Digest("b")),
        replace(job(), workload_version=2),
    ]
    assert len({workload_key(each) for each in (job(), *others)}) == 7


@pytest.mark.parametrize(
    "capabilities",
    [
        Capabilities(device="cuda"),
        Capabilities(device_name="another"),
        Capabilities(torch="2.9"),
        Capabilities(caps={"worker_threads": 1}),
    ],
)
def test_a_device_is_its_kind_limits_and_versions(capabilities: Capabilities) -> None:
    plain = ControlStream(NODE, Capabilities(), "1.0")
    other = ControlStream(NODE, capabilities, "1.0")
    newer = ControlStream(NODE, Capabilities(), "1.1")
    assert len({device_key(each) for each in (plain, other, newer)}) == 3


def test_nodes_that_are_not_connected_have_no_source() -> None:
    streams = {NODE: ControlStream(NODE, Capabilities(name="attic"), "1.0")}
    assert speed_sources(job(), streams, [NODE, OTHER]).keys() == {NODE}

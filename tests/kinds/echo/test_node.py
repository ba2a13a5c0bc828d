"""A node whose worker has one more entry in its table: it does the work and sends the result."""

import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from gpu_node.core.limits import OwnerLimits
from hypergpu.assignment import Lease, PackedAssignment
from hypergpu.ids import JobId, Slot
from hypergpu.packed_work import pack_work, unpack_work
from hypergpu.units import Milliseconds
from hypergpu.v1 import node_pb2
from hypergpu.wire.messages import lease_message
from hypergpu.wire.work import work_assignment_message, work_value
from tests.integration.node.fake_coordinator import DaemonKit, serve
from tests.kinds.echo.core.state import KIND, VERSION, EchoItem
from tests.kinds.echo.worker import MODULE, REFUSAL

JOB = JobId("job-00000000000e")


@pytest.fixture
async def kit(tmp_path: Path) -> AsyncIterator[DaemonKit]:
    async with serve(tmp_path / "authority") as there:
        kit = DaemonKit(there, tmp_path)
        kit.settings = kit.settings.model_copy(
            update={"worker_module": MODULE, "worker": "null", "worker_spares": 0}
        )
        workloads = {"null": 1, KIND: VERSION}
        kit.capabilities = replace(
            kit.capabilities, kind="null", workloads=workloads, work_kinds=(KIND,)
        )
        kit.limits = OwnerLimits(kinds=("training", KIND))
        yield kit


def give(
    kit: DaemonKit, number: int, text: str, keep_ms: int = 0, after: Lease | None = None
) -> Lease:
    """Assign an item, whose lease has the next number, at once or after another one."""
    item = EchoItem(number, text, Milliseconds(keep_ms))
    lease = Lease(JOB, number, number + 1)
    assignment = PackedAssignment(
        lease=lease,
        slot=Slot(0),
        work=pack_work(KIND, item),
        after_lease=0 if after is None else after.number,
        reason="a test",
    )
    message = node_pb2.ControlResponse(work_assignment=work_assignment_message(assignment))
    kit.service.to_say.put_nowait(message)
    return lease


async def test_a_node_names_the_kind_and_gives_each_item_back(kit: DaemonKit) -> None:
    async with kit.daemon(kit.there.token):
        for number in range(3):
            lease = give(kit, number, f"text {number}")
            back = await kit.service.contributed.get()
            assert back.lease.number == lease.number
            item = unpack_work(work_value(back.result), KIND, EchoItem)
            assert item == EchoItem(number, f"text {number}")
    versions = {each.name: each.version for each in kit.service.joins[0].capabilities.workloads}
    assert versions[KIND] == VERSION


async def test_an_item_that_cannot_be_done_comes_back_with_the_reason(kit: DaemonKit) -> None:
    async with kit.daemon(kit.there.token):
        lease = give(kit, 0, f"{REFUSAL}too hot")
        back = await kit.service.next_said("hand_back")
        assert (back.lease.number, back.reason) == (lease.number, "too hot")
        give(kit, 1, "text")
        assert (await kit.service.contributed.get()).lease.number == 2


async def test_a_node_does_its_next_work_after_the_first_and_gives_both_back_in_order(
    kit: DaemonKit,
) -> None:
    async with kit.daemon(kit.there.token):
        first = give(kit, 0, "first", keep_ms=200)
        second = give(kit, 1, "second", after=first)
        backs = [await kit.service.contributed.get() for _ in range(2)]
        assert [each.lease.number for each in backs] == [first.number, second.number]
        third = give(kit, 2, "third", after=second)
        assert (await kit.service.contributed.get()).lease.number == third.number


async def test_a_worker_that_is_killed_goes_on_with_what_its_node_still_has(kit: DaemonKit) -> None:
    async with kit.daemon(kit.there.token):
        give(kit, 0, "text")
        await kit.service.contributed.get()
        first = give(kit, 1, "first", keep_ms=1_000)
        second = give(kit, 2, "second", after=first)
        cancel = node_pb2.Cancel(lease=lease_message(second), reason="a test")
        kit.service.to_say.put_nowait(node_pb2.ControlResponse(cancel=cancel))
        third = give(kit, 3, "third", after=first)
        lease = 0
        while lease != first.number:
            lease = (await kit.service.next_said("progress")).lease.number
        kit.signal_worker(signal.SIGKILL)
        backs = [await kit.service.contributed.get() for _ in range(2)]
        assert [each.lease.number for each in backs] == [first.number, third.number]


async def test_a_void_lease_ends_its_work_and_the_worker_goes_on(kit: DaemonKit) -> None:
    async with kit.daemon(kit.there.token):
        give(kit, 0, "first")
        await kit.service.contributed.get()
        lease = give(kit, 1, "long", keep_ms=240_000)
        assert kit.running is not None
        worker = kit.running.worker_process_id
        cancel = node_pb2.Cancel(lease=lease_message(lease), reason="a test")
        kit.service.to_say.put_nowait(node_pb2.ControlResponse(cancel=cancel))
        give(kit, 2, "second")
        back = await kit.service.contributed.get()
        assert unpack_work(work_value(back.result), KIND, EchoItem).text == "second"
        assert kit.running.worker_process_id == worker


async def test_a_node_does_training_only_until_its_owner_allows_more(kit: DaemonKit) -> None:
    kit.limits = OwnerLimits()
    async with kit.daemon(kit.there.token):
        give(kit, 0, "text")
        back = await kit.service.next_said("hand_back")
        assert back.reason.startswith("OWNER_KIND (7109)")
        assert 'kinds = ["training", "echo"]' in back.reason
    names = {each.name for each in kit.service.joins[0].capabilities.workloads}
    assert names == {"null"}


async def test_an_owner_may_refuse_training(kit: DaemonKit) -> None:
    kit.limits = OwnerLimits(kinds=(KIND,))
    async with kit.daemon(kit.there.token):
        lease = give(kit, 0, "text")
        assert (await kit.service.contributed.get()).lease.number == lease.number
    names = {each.name for each in kit.service.joins[0].capabilities.workloads}
    assert names == {KIND}


async def test_an_owner_may_refuse_a_kind(kit: DaemonKit) -> None:
    kit.limits = OwnerLimits(workloads=("digits-softmax",), kinds=("training", KIND))
    async with kit.daemon(kit.there.token):
        give(kit, 0, "text")
        back = await kit.service.next_said("hand_back")
        assert back.reason.startswith("OWNER_WORKLOAD")
    assert KIND not in {each.name for each in kit.service.joins[0].capabilities.workloads}


async def test_work_of_a_kind_that_the_worker_lacks_comes_back(kit: DaemonKit) -> None:
    kit.settings = kit.settings.model_copy(update={"worker_module": "gpu_node.shell.worker"})
    async with kit.daemon(kit.there.token):
        give(kit, 0, "text")
        back = await kit.service.next_said("hand_back")
        assert back.reason == f"this worker does no work of kind {KIND}"


async def test_work_that_is_too_large_is_not_read(kit: DaemonKit) -> None:
    async with kit.daemon(kit.there.token):
        await kit.service.heartbeat.wait()
        message = node_pb2.ControlResponse()
        message.work_assignment.lease.CopyFrom(node_pb2.Lease(job_id=JOB, number=1))
        message.work_assignment.work.kind = KIND
        message.work_assignment.work.body = bytes(65_537)
        kit.service.to_say.put_nowait(message)
        back = await kit.service.next_said("hand_back")
        assert "65537 bytes" in back.reason

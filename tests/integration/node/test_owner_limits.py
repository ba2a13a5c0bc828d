"""The owner's limits kept by a real daemon: before a byte is fetched, and while it works."""

import asyncio
import json
import os
import sys
import time
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from gpu_node.core.events import TrainedUpdate
from gpu_node.core.limits import HourSpan, OwnerLimits
from gpu_node.shell.owner.limits_file import MachineReader, load_limits, watch_worker
from gpu_node.shell.transfer.uploads import check_size
from hypergpu.assignment import FailureCause
from hypergpu.errors import HyperGPUError
from hypergpu.line_limits import PIECE_BYTES, StallTimeout
from hypergpu.part_file import Span
from hypergpu.units import Bytes, Milliseconds, Samples
from hypergpu.v1 import node_pb2, tensor_pb2
from hypergpu.wire.authority import TLS_NAME
from hypergpu.wire.bulk import BulkClient, BulkRates, RateLimit, open_file
from hypergpu.wire.bulk_ranges import FileRange
from hypergpu.wire.credentials import token_text
from hypergpu.wire.messages import blob_value
from tests import unruly_workload
from tests.integration.node.fake_coordinator import CAPABILITIES, DaemonKit, serve
from tests.integration.node.test_node_command import node
from tests.unit.node.node_states import digest


@pytest.fixture
async def kit(tmp_path: Path) -> AsyncIterator[DaemonKit]:
    async with serve() as there:
        yield DaemonKit(there, tmp_path)


async def reason_of_refusal(kit: DaemonKit, **work: tensor_pb2.BlobRef | str) -> str:
    """Why a daemon with the kit's limits hands work back, having fetched nothing."""
    async with asyncio.timeout(60), kit.daemon(kit.there.token):
        kit.assign(0, 1, **work)  # type: ignore[arg-type]
        back = await kit.service.next_said("hand_back")
    assert back.cause == node_pb2.FAILURE_CAUSE_OWNER
    return str(back.reason)


async def test_another_workload_than_the_owners_is_declined_before_a_byte_is_fetched(
    kit: DaemonKit,
) -> None:
    kit.limits = OwnerLimits(workloads=("torch",))
    kit.capabilities = replace(CAPABILITIES, workload_kinds={"digits-softmax": "numpy"})
    reason = await reason_of_refusal(kit)
    assert reason.startswith("OWNER_WORKLOAD (7102): digits-softmax is none of its")
    assert kit.service.asked_bytes == kit.service.tickets == 0


async def test_a_program_that_a_coordinator_assigns_to_a_node_without_a_sandbox_is_declined(
    kit: DaemonKit,
) -> None:
    kit.settings = kit.settings.model_copy(update={"sandbox": "off"})
    reason = await reason_of_refusal(kit, workload="program")
    assert reason.startswith("OWNER_WORKLOAD (7102): program is not among its workloads by name")
    assert kit.service.asked_bytes == kit.service.tickets == 0


async def test_a_workload_that_the_owner_does_not_allow_is_not_offered(kit: DaemonKit) -> None:
    kit.limits = OwnerLimits(workloads=("null",))
    async with asyncio.timeout(60), kit.daemon(kit.there.token):
        greeting = await kit.service.next_said("hello")
    assert list(greeting.capabilities.workloads) == []


async def test_a_data_set_that_the_owner_has_not_named_is_refused_before_a_byte_is_fetched(
    kit: DaemonKit,
) -> None:
    kit.limits = OwnerLimits(data={"chest-xrays": str(kit.folder)})
    reason = await reason_of_refusal(kit, data_name="wards")
    assert reason.startswith("OWNER_DATA (7108): its owner has named no folder for the data set w")
    assert kit.service.asked_bytes == kit.service.tickets == 0


async def test_a_greeting_names_data_sets_and_no_folder(kit: DaemonKit) -> None:
    kit.limits = OwnerLimits(data={"wards": "/srv/wards", "chest-xrays": "/srv/xrays"})
    async with asyncio.timeout(60), kit.daemon(kit.there.token):
        greeting = await kit.service.next_said("hello")
    assert list(greeting.capabilities.data_names) == ["chest-xrays", "wards"]
    assert "srv" not in str(greeting)


async def test_a_model_beyond_the_owners_memory_or_disk_is_declined_before_a_byte_is_fetched(
    kit: DaemonKit,
) -> None:
    kit.limits = OwnerLimits(memory_bytes=Bytes(9_000))
    memory = await reason_of_refusal(kit)
    kit.service.forget_said()
    kit.limits = OwnerLimits(disk_bytes=Bytes(20_000))
    disk = await reason_of_refusal(kit)
    assert "OWNER_MEMORY (7104): training takes 10400 bytes of memory at least" in memory
    assert "OWNER_DISK (7103): the job takes 26000 bytes of disk beside 0" in disk
    assert kit.service.asked_bytes == kit.service.tickets == 0


async def test_a_dataset_beyond_the_owners_disk_is_declined_when_its_manifest_is_known(
    kit: DaemonKit,
) -> None:
    content = b"x" * 100_000
    entry = tensor_pb2.ManifestEntry(path="big", blob=kit.service.put(content))
    manifest = kit.service.put(tensor_pb2.Manifest(entries=[entry]).SerializeToString())
    kit.limits = OwnerLimits(disk_bytes=Bytes(100_000))
    reason = await reason_of_refusal(kit, manifest=manifest)
    assert "OWNER_DISK (7103): the dataset has 100000 bytes" in reason
    assert kit.service.asked_bytes == manifest.size_bytes


async def test_work_within_the_limits_is_done(kit: DaemonKit) -> None:
    kit.limits = OwnerLimits(
        workloads=("digits-softmax",),
        disk_bytes=Bytes(10**9),
        memory_bytes=Bytes(2 * 10**9),
        threads=1,
        hours=(HourSpan(0, 1440),),
        upload_bits_per_s=8_000_000,
        download_bits_per_s=8_000_000,
    )
    async with kit.daemon(kit.there.token):
        greeting = await kit.service.next_said("hello")
        kit.assign(0, 1)
        await kit.update()
    caps = greeting.capabilities.caps
    assert (caps.worker_threads, caps.disk_bytes, caps.upload_bits_per_s) == (1, 10**9, 8_000_000)


def now_excluded() -> HourSpan:
    """An hour of the day that is not now, for hours to come."""
    local = time.localtime()
    begin = (local.tm_hour * 60 + local.tm_min + 12 * 60) % 1440
    return HourSpan(begin, (begin + 60) % 1440)


async def test_outside_its_hours_a_node_says_so_and_takes_no_work(kit: DaemonKit) -> None:
    kit.limits = OwnerLimits(hours=(now_excluded(),))
    async with asyncio.timeout(60), kit.daemon(kit.there.token):
        drain_message = await kit.service.next_said("draining")
        kit.assign(0, 1)
        back = await kit.service.next_said("hand_back")
        assert kit.running is not None
        kit.running.reporter.write()
        report = json.loads((kit.settings.state_dir / "report.json").read_text())
    assert drain_message.reason == back.reason
    assert back.cause == node_pb2.FAILURE_CAUSE_OWNER
    assert drain_message.reason.startswith("OWNER_HOURS (7105): its owner lets it work at")
    assert report["state"] == "withheld"


async def test_a_worker_beyond_the_owners_memory_is_ended_and_its_shard_handed_back(
    tmp_path: Path,
) -> None:
    unruly = {"PYTHONPATH": unruly_workload.install(tmp_path / "packages")}
    join = ("join", "--token-file", "-", "--limit", "memory=400MB")
    async with serve(tmp_path / "authority") as there:
        kit = DaemonKit(there, tmp_path)
        async with (
            asyncio.timeout(120),
            node(tmp_path / "node", *join, HYPERGPU_NODE_WORKER="numpy", **unruly) as process,
        ):
            assert process.stdin is not None
            process.stdin.write(token_text(there.token).encode() + b"\n")
            kit.assign(0, 1, workload=unruly_workload.NAME, options='{"deed": "devour"}')
            back = await kit.service.next_said("hand_back")
            assert back.cause == node_pb2.FAILURE_CAUSE_OUT_OF_MEMORY
            assert back.reason.startswith("out of memory")
            kit.assign(0, 2)
            await kit.update()


HOLDS = "import sys; held = bytearray(300 << 20); print(len(held), flush=True); sys.stdin.read()"


async def end_of_worker(
    limits: OwnerLimits, process_id: int, kept_bytes: int
) -> tuple[str, FailureCause]:
    """Why a worker with this process id is ended."""
    failure: asyncio.Future[tuple[str, FailureCause]] = asyncio.get_running_loop().create_future()

    def end(reason: str, cause: FailureCause) -> None:
        if not failure.done():
            failure.set_result((reason, cause))

    watch_task = asyncio.create_task(
        watch_worker(limits, lambda: process_id, lambda: kept_bytes, end)
    )
    try:
        async with asyncio.timeout(60):
            return await failure
    finally:
        watch_task.cancel()


async def test_memory_is_counted_with_all_that_the_worker_started() -> None:
    limits = OwnerLimits(memory_bytes=Bytes(200 << 20))
    program = f"import subprocess as s, sys; s.run([sys.executable, '-c', {HOLDS!r}])"
    worker = await asyncio.create_subprocess_exec(
        sys.executable, "-c", program, stdin=PIPE, stdout=PIPE
    )
    assert worker.stdout is not None
    await worker.stdout.readline()
    reason, cause = await end_of_worker(limits, worker.pid, 0)
    await worker.communicate(b"")
    assert cause is FailureCause.OUT_OF_MEMORY
    assert reason.startswith("out of memory: it took 3")
    assert reason.endswith("bytes, its owner allows 209715200")


async def test_a_worker_that_fills_the_owners_disk_is_ended() -> None:
    limits = OwnerLimits(disk_bytes=Bytes(1000))
    reason, cause = await end_of_worker(limits, os.getpid(), 1001)
    assert cause is FailureCause.OWNER
    assert reason.startswith("OWNER_DISK (7103): its files take 1001 bytes of disk")


@pytest.fixture
def card(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file of what nvidia-smi answers, a line for each figure that is asked."""
    answers = tmp_path / "answers"
    answers.mkdir()
    program = tmp_path / "bin" / "nvidia-smi"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec /bin/cat "{answers}/${{1#--query-}}"\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    return answers


def test_a_gpu_above_the_owners_power_or_in_use_is_left_alone(card: Path, tmp_path: Path) -> None:
    (card / "gpu=index").write_text("0\n")
    (card / "gpu=enforced.power.limit").write_text("300.00\n")
    limits = load_limits(tmp_path, ["gpu=0", "power=250"])
    refusal = MachineReader(limits).refusal()
    assert refusal == ("OWNER_POWER", "the GPU may take 300 W, its owner allows 250 W")
    (card / "gpu=enforced.power.limit").write_text("250.00\n")
    assert MachineReader(limits).refusal() is None
    (card / "compute-apps=pid").write_text(f"{os.getpid()}\n1\n")
    busy = MachineReader(OwnerLimits(only_when_idle=True)).refusal()
    assert busy == ("OWNER_BUSY", "its owner uses the machine")


async def test_an_upload_keeps_to_the_owners_rate(kit: DaemonKit, tmp_path: Path) -> None:
    content = b"x" * 400_000
    (tmp_path / "sent").write_bytes(content)
    kit.service.stored = bytearray(len(content))
    client = BulkClient("127.0.0.1", None, BulkRates(up=RateLimit(4_000_000)))
    whole = Span(0, len(content))
    url = f"http://{TLS_NAME}:{kit.service.bulk_port}/upload"
    stall = StallTimeout(PIECE_BYTES, Milliseconds(10_000))
    began_s = time.monotonic()
    ticket_range = tensor_pb2.TicketRange(url=url, end=len(content))
    await client.send(ticket_range, FileRange(tmp_path / "sent", whole), stall, lambda _: None)
    took_s = time.monotonic() - began_s
    await client.close()
    assert bytes(kit.service.stored) == content
    assert took_s >= 0.8


async def test_downloads_over_two_connections_share_the_owners_rate(kit: DaemonKit) -> None:
    content = b"x" * 400_000
    blob = blob_value(kit.service.put(content))
    client = BulkClient("127.0.0.1", None, BulkRates(down=RateLimit(4_000_000)))
    url = f"http://{TLS_NAME}:{kit.service.bulk_port}/{blob.digest}"
    ticket_range = tensor_pb2.TicketRange(url=url, end=len(content))

    async def fetch(span: Span) -> bytes:
        stall = StallTimeout(PIECE_BYTES, Milliseconds(10_000))
        async with client.open(ticket_range, span, stall) as pieces:
            return b"".join([piece async for piece in pieces])

    began_s = time.monotonic()
    halves = await asyncio.gather(fetch(Span(0, 200_000)), fetch(Span(200_000, 400_000)))
    took_s = time.monotonic() - began_s
    await client.close()
    assert b"".join(halves) == content
    assert took_s >= 0.8


def test_a_link_in_place_of_an_update_is_not_sent(tmp_path: Path) -> None:
    key, update = tmp_path / "identity.key", tmp_path / "update-0"
    key.write_text("secret")
    update.symlink_to(key)
    trained_update = TrainedUpdate(digest("update"), Bytes(6), inner_steps=1, samples=Samples(1))
    with pytest.raises(HyperGPUError, match="is no file"):
        check_size(update, trained_update)
    with pytest.raises(OSError, match="Too many levels of symbolic links"):
        open_file(update)

"""Events go to a real Redis, which is killed, comes back, and loses its end or everything."""

import asyncio
import json
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import msgspec
import pytest
from redis.asyncio import Redis

from coordinator.shell.outbox.cursors import CursorStore
from coordinator.shell.outbox.outbox import Outbox, OutboxSource
from coordinator.shell.outbox.redis_stream import RedisStream, parse_address
from coordinator.shell.store.journal.journal import Journal
from coordinator.shell.store.journal.records import Entry
from hypergpu.ids import Address, JobId
from hypergpu.jobfile.spec import JobSpec, TrainingSettings
from hypergpu.ledger_terms import Domain
from hypergpu.statements import SignedReceipt, receipt_fault
from tests.processes import Cluster
from tests.redis_server import RedisServer

pytestmark = pytest.mark.needs("redis-server")

Pages = list[tuple[str, list[tuple[str, dict[str, str]]]]]
JOB = JobId("1" * 26)
QUICK = JobSpec(
    workload="digits-softmax", training=TrainingSettings(rounds=2, inner_steps=5, nodes=2)
)


class Sender:
    """An outbox over a journal that the test writes."""

    def __init__(self, folder: Path, server: RedisServer) -> None:
        self.journal = Journal(str(folder / "journal.sqlite"))
        self.reason = ""
        self.has_told = asyncio.Event()
        self.outbox = Outbox(
            OutboxSource(self.journal, self.journal.jobs, None),
            RedisStream(parse_address(server.url)),
            CursorStore("", folder),
            self.tell,
            check_every_s=0.05,
        )

    def tell(self, reason: str) -> None:
        self.reason = reason
        self.has_told.set()

    def write(self, *sequences: int, kind: str = "RoundRecorded") -> None:
        self.journal.append(
            [Entry(JOB, each, each, kind, b'{"round":%d}' % each) for each in sequences]
        )
        self.outbox.wake([JOB])

    async def wait_for_reason(self) -> str:
        """The next time that nothing is sent."""
        while not self.reason:
            await self.next_report()
        return self.reason

    async def next_report(self) -> None:
        """The next time that all is sent, and cursors are kept, or that nothing is sent."""
        self.has_told.clear()
        await self.has_told.wait()


@asynccontextmanager
async def sender(folder: Path, server: RedisServer) -> AsyncIterator[Sender]:
    redis_sender = Sender(folder, server)
    outbox_task = asyncio.create_task(redis_sender.outbox.run())
    try:
        yield redis_sender
    finally:
        outbox_task.cancel()
        with suppress(asyncio.CancelledError):
            await outbox_task
        await redis_sender.outbox.close()
        redis_sender.journal.close()


async def entries_until(server: RedisServer, last: str) -> list[dict[str, str]]:
    """All entries up to the first with this position, or of this kind."""
    entry_list: list[dict[str, str]] = []
    async with Redis.from_url(server.url, decode_responses=True) as reader:
        newest = "0"
        while True:
            ((_, page),) = msgspec.convert(await reader.xread({"hypergpu": newest}, block=0), Pages)
            newest = page[-1][0]
            for _, fields in page:
                entry_list.append(fields)
                if last in (fields["position"], fields["kind"]):
                    return entry_list


def position(sequence: int) -> str:
    return f"{JOB}:{sequence}:0"


def sequences(entries: list[dict[str, str]]) -> list[int]:
    return [int(entry["sequence"]) for entry in entries]


async def test_rounds_arrive_in_order_with_their_position(tmp_path: Path) -> None:
    with RedisServer(tmp_path) as server:
        async with sender(tmp_path, server) as redis_sender:
            redis_sender.write(0)
            redis_sender.write(1, kind="NodeJoined")
            redis_sender.write(2, 3)
            entries = await entries_until(server, position(3))
    assert sequences(entries) == [0, 2, 3]
    assert entries[1] == {
        "position": f"{JOB}:2:0",
        "job": JOB,
        "sequence": "2",
        "index": "0",
        "kind": "RoundRecorded",
        "at_ms": "2",
        "body": '{"round":2}',
    }


async def test_next_start_goes_on_behind_what_was_acknowledged(tmp_path: Path) -> None:
    with RedisServer(tmp_path) as server:
        async with sender(tmp_path, server) as redis_sender:
            redis_sender.write(0, 1)
            await entries_until(server, position(1))
            await redis_sender.next_report()
        async with sender(tmp_path, server) as redis_sender:
            redis_sender.write(2)
            assert sequences(await entries_until(server, position(2))) == [0, 1, 2]


async def test_kill_before_the_cursor_is_stored_repeats_a_position(tmp_path: Path) -> None:
    with RedisServer(tmp_path) as server:
        async with sender(tmp_path, server) as redis_sender:
            redis_sender.write(0)
            await entries_until(server, position(0))
        (tmp_path / "events.sqlite").unlink()
        async with sender(tmp_path, server) as redis_sender:
            redis_sender.write(1)
            entries = await entries_until(server, position(1))
    assert sequences(entries) == [0, 0, 1]
    assert entries[0] == entries[1]


async def test_events_wait_for_a_redis_that_is_away(tmp_path: Path) -> None:
    server = RedisServer(tmp_path)
    async with sender(tmp_path, server) as redis_sender:
        redis_sender.write(0)
        assert f"redis://127.0.0.1:{server.port}/0: " in await redis_sender.wait_for_reason()
        with server:
            await entries_until(server, position(0))
            redis_sender.write(1)
            server.kill()
            redis_sender.write(2)
            await redis_sender.wait_for_reason()
            server.start()
            entries = await entries_until(server, position(2))
    assert sorted(set(sequences(entries))) == [0, 1, 2]


async def test_events_wait_while_their_journal_cannot_be_read(tmp_path: Path) -> None:
    with RedisServer(tmp_path) as server:
        async with sender(tmp_path, server) as redis_sender:
            redis_sender.write(0)
            await entries_until(server, position(0))
            (tmp_path / "journal.sqlite").rename(tmp_path / "away")
            redis_sender.journal.close()
            redis_sender.outbox.wake([JOB])
            assert "see the coordinator's log" in await redis_sender.wait_for_reason()


async def test_redis_that_lost_its_end_gets_it_again(tmp_path: Path) -> None:
    older = tmp_path / "older"
    with RedisServer(tmp_path) as server:
        async with sender(tmp_path, server) as redis_sender:
            redis_sender.write(0, 1, 2)
            await entries_until(server, position(2))
            shutil.copytree(server.data, older)
            redis_sender.write(3, 4, 5)
            await entries_until(server, position(5))
            server.kill()
            shutil.rmtree(server.data)
            shutil.copytree(older, server.data)
            server.start()
            entries = await entries_until(server, position(5))
    assert sorted(set(sequences(entries))) == [0, 1, 2, 3, 4, 5]


async def test_redis_that_lost_all_gets_all_again_before_anything_new(tmp_path: Path) -> None:
    with RedisServer(tmp_path, is_durable=False) as server:
        async with sender(tmp_path, server) as redis_sender:
            redis_sender.write(0, 1)
            await entries_until(server, position(1))
            server.kill()
            redis_sender.write(2)
            server.start()
            assert sequences(await entries_until(server, position(2))) == [0, 1, 2]


async def test_sender_ends_though_rows_come_at_that_instant(tmp_path: Path) -> None:
    with RedisServer(tmp_path) as server:
        async with asyncio.timeout(60) as limit, sender(tmp_path, server) as redis_sender:
            await redis_sender.next_report()
            redis_sender.write(0)
    assert not limit.expired()


async def test_receipts_of_a_job_are_sent_and_hold(tmp_path: Path) -> None:
    with (
        RedisServer(tmp_path) as server,
        Cluster(tmp_path / "cluster", "--events", f"{server.url}?maxlen=0") as cluster,
    ):
        cluster.add_nodes(2)
        job = cluster.wait_until_finished(cluster.submit(QUICK))
        entries = await entries_until(server, "JobEnded")
    kinds = [each["kind"] for each in entries]
    assert (kinds[0], kinds.count("RoundRecorded")) == ("JobCreated", 2)
    terms = json.loads(entries[0]["body"])["terms"]
    receipts = [
        msgspec.json.decode(each["body"], type=SignedReceipt)
        for each in entries
        if each["kind"] == "Receipt"
    ]
    assert len(receipts) == job.updates_accepted == 4
    faults = {receipt_fault(each, Domain(), Address(terms["coordinator"])) for each in receipts}
    assert faults == {""}
    positions = [(int(each["sequence"]), int(each["index"])) for each in entries]
    assert positions == sorted(set(positions))

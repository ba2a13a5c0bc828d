"""Receipts are made once, with the journal's rows, whatever is replayed or cut back."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from msgspec.structs import replace

from coordinator.core import events
from coordinator.core.job import BlobRef, Model, Update
from coordinator.shell.journal.memory import MemoryJournal
from coordinator.shell.journal.records import Head
from coordinator.shell.metering.desk import LedgerDesk
from coordinator.shell.runtime.driver import Driver
from coordinator.shell.runtime.recovery import replayed
from hypergpu.digest import digest_of
from hypergpu.ids import JobId, NodeId
from hypergpu.jobfile.spec import JobSpec, Pay, TrainingSettings
from hypergpu.signature import IdentityKey
from hypergpu.units import Bytes, Milliseconds, Samples

JOB = JobId("job-000000000001")
NODE, LATER = NodeId("0x" + "a1" * 20), NodeId("0x" + "b2" * 20)
DESK = LedgerDesk(IdentityKey(bytes(31) + b"\x02"))
SPEC = JobSpec(
    workload="null",
    training=TrainingSettings(rounds=5, inner_steps=1, batch_size=100, nodes=1),
    pay=Pay(unit_price=1_000, rounds_per_epoch=2, judged=0),
)
NOW = Milliseconds(0)


def model(number: int) -> Model:
    return Model(number, BlobRef(digest_of(f"model {number}".encode()), Bytes(8)))


def folded(number: int, agreement: float = 0.5) -> events.AggregateReady:
    return events.AggregateReady(
        at_ms=NOW, round=number, model=model(number + 1), agreements={NODE: agreement}
    )


@asynccontextmanager
async def driven(journal: MemoryJournal) -> AsyncIterator[Driver]:
    """A driver that goes on with what the journal holds."""
    driver = Driver(journal, DESK.countersigned)
    driver.rooms.update(replayed(journal).rooms)
    running = asyncio.create_task(driver.run(lambda *_: None, lambda *_: None))
    yield driver
    driver.close()
    await running


async def sent(driver: Driver, node: NodeId = NODE) -> None:
    """A node sends the update that it owes."""
    round_ = driver.rooms[JOB].job.round
    assert round_ is not None
    blob = BlobRef(digest_of(f"update {round_.number}".encode()), Bytes(4))
    update = Update(blob, Samples(0), 0, nonce=round_.number + 1, signature=bytes(65))
    lease = round_.participants[node].lease
    received = events.UpdateReceived(
        at_ms=NOW, node=node, round=round_.number, lease=lease, update=update
    )
    assert await driver.submit(JOB, received) == ""


async def begun(driver: Driver) -> None:
    """A job in round 0 with its one node."""
    created = events.JobCreated(at_ms=NOW, job_id=JOB, spec=SPEC, terms=DESK.terms(JOB, SPEC.pay))
    first = events.ModelInitialised(at_ms=NOW, model=model(0), partition_sizes=(Samples(1000),))
    for event in (created, first, events.NodeJoined(at_ms=NOW, node=NODE)):
        assert await driver.submit(JOB, event) == ""


async def test_a_round_and_its_receipts_are_in_the_journal_together() -> None:
    journal = MemoryJournal()
    async with driven(journal) as driver:
        await begun(driver)
        await sent(driver)
        assert journal.receipts(JOB) == ()
        await driver.submit(JOB, folded(0))
        (record,) = journal.receipts(JOB)
    assert record.signed.receipt.sequence == 0
    kinds = [entry.kind for entry in journal.read(JOB).entries]
    assert kinds[-3:] == ["AggregateReady", "RoundRecorded", "RoundMetered"]


async def test_a_replay_makes_no_receipt_again() -> None:
    journal = MemoryJournal()
    async with driven(journal) as driver:
        await begun(driver)
        await sent(driver)
        await driver.submit(JOB, folded(0))
    before = journal.receipts(JOB)
    async with driven(journal) as driver:
        assert journal.receipts(JOB) == before
        await sent(driver)
        await driver.submit(JOB, folded(1))
    assert [record.signed.receipt.sequence for record in journal.receipts(JOB)] == [0, 1]


async def test_of_a_journal_that_was_cut_back_what_was_signed_once_stands() -> None:
    journal = MemoryJournal()
    async with driven(journal) as driver:
        await begun(driver)
        await sent(driver)
        reading = journal.read(JOB)
        await driver.submit(JOB, folded(0, agreement=0.5))
    (before,) = journal.receipts(JOB)
    journal.cut_back(JOB, Head(reading.head.sequence, reading.head.chain))
    async with driven(journal) as driver:
        again = replace(folded(0), agreements={})
        assert await driver.submit(JOB, again) == ""
        assert journal.receipts(JOB) == (before,)
        await sent(driver)
        await driver.submit(JOB, folded(1))
    assert [record.signed.receipt.sequence for record in journal.receipts(JOB)] == [0, 1]


async def test_of_an_epoch_that_a_cut_back_job_lives_through_again_new_receipts_are_kept() -> None:
    journal = MemoryJournal()
    async with driven(journal) as driver:
        await begun(driver)
        await sent(driver)
        reading = journal.read(JOB)
        await driver.submit(JOB, folded(0))
        await sent(driver)
        await driver.submit(JOB, folded(1))
    assert [record.is_left for record in journal.epochs()] == [True]
    before = journal.receipts(JOB)
    journal.cut_back(JOB, Head(reading.head.sequence, reading.head.chain))
    async with driven(journal) as driver:
        assert await driver.submit(JOB, events.NodeJoined(at_ms=NOW, node=LATER)) == ""
        assert await driver.submit(JOB, folded(0)) == ""
        await sent(driver)
        await sent(driver, LATER)
        assert await driver.submit(JOB, folded(1)) == ""
    assert journal.receipts(JOB, node=NODE) == before
    (record,) = journal.receipts(JOB, node=LATER)
    assert (record.signed.receipt.sequence, record.signed.receipt.epoch) == (0, 0)
    assert record.leaf in {one.leaf for one in journal.unsealed(9)}

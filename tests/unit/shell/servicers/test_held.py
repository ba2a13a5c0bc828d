"""What nodes hold tells a coordinator that its journal is an older copy, if it is proven."""

from pathlib import Path
from typing import Any

import pytest

from coordinator.core.job import Phase
from coordinator.shell.journal.ledger.records import Earnings, ReceiptRecord
from coordinator.shell.journal.memory import MemoryJournal
from coordinator.shell.runtime.parts import Parts
from coordinator.shell.runtime.recovery import replayed
from coordinator.shell.servicers.node.control import pending_assignment
from coordinator.shell.servicers.node.held import of_this_coordinator, pause_what_is_older
from coordinator.shell.servicers.user.job import JobServicer
from hypergpu.errors import HyperGPUError
from hypergpu.v1 import job_pb2, receipt_pb2
from hypergpu.wire.ledger import receipt_message
from tests.signed_receipts import Work, node_key, receipt_record
from tests.unit.shell.servicers.paid_rounds import begun, judged, one_round
from tests.unit.shell.whole_shell import JOB, NODE, driving, parts_in

NOBODY: Any = None
RowsAndReceipts = tuple[int, int]
"""How many rows of the job, and how many receipts, a copy of a journal has."""


async def three_receipts(folder: Path) -> tuple[Parts, RowsAndReceipts]:
    """A coordinator that has signed three, and what its journal had after the first."""
    parts = parts_in(folder)
    async with driving(parts):
        await begun(parts)
        await one_round(parts, 0)
        await judged(parts, 0)
        after_first = (parts.driver.rooms[JOB].next_sequence, 1)
        for number in (1, 2):
            await one_round(parts, number)
            await judged(parts, number)
    return parts, after_first


def on_a_copy(parts: Parts, kept: RowsAndReceipts, folder: Path) -> Parts:
    """Another coordinator that starts on so much of its journal."""
    rows, receipts = kept
    journal = MemoryJournal()
    earnings = Earnings(parts.journal.receipts(JOB)[:receipts])
    journal.append(parts.journal.read(JOB).entries[:rows], (), earnings)
    copy = parts_in(folder, journal)
    copy.driver.rooms.update(replayed(journal).rooms)
    return copy


def held(record: ReceiptRecord) -> receipt_pb2.ReceiptsHeld:
    """What a node says whose last receipt this is."""
    count = record.signed.receipt.sequence + 1
    return receipt_pb2.ReceiptsHeld(
        job_id=record.job_id, count=count, newest=receipt_message(record.signed)
    )


async def hear(parts: Parts, told: receipt_pb2.ReceiptsHeld) -> Phase:
    """A node says what it holds. Gives the phase of the job behind that."""
    async with driving(parts):
        await pause_what_is_older(parts, NODE, of_this_coordinator(parts, [told]))
    return parts.driver.rooms[JOB].job.phase


async def test_a_job_of_an_older_copy_is_paused_by_a_receipt_that_the_copy_lacks(
    tmp_path: Path,
) -> None:
    parts, after_first = await three_receipts(tmp_path / "first")
    copy = on_a_copy(parts, after_first, tmp_path / "copy")
    newest = parts.journal.receipts(JOB)[-1]
    assert pending_assignment(copy.driver.rooms[JOB].job, NODE) is not None

    assert await hear(copy, held(newest)) is Phase.PAUSED
    job = copy.driver.rooms[JOB].job
    assert pending_assignment(job, NODE) is None
    assert f"{NODE} holds receipt 2 of {JOB}" in job.reason
    assert "the journal has 1 of that node: it is an older copy" in job.reason
    assert "start it with the newest journal" in job.reason
    again = JobServicer(copy).resume_job(job_pb2.ResumeJobRequest(job_id=JOB), NOBODY)
    with pytest.raises(HyperGPUError, match="it is an older copy"):
        await again


async def test_what_the_journal_has_pauses_nothing(tmp_path: Path) -> None:
    parts, after_first = await three_receipts(tmp_path / "first")
    newest = parts.journal.receipts(JOB)[-1]
    again = on_a_copy(parts, (parts.driver.rooms[JOB].next_sequence, 3), tmp_path / "whole")
    assert await hear(again, held(newest)) is Phase.TRAINING
    # Rows were lost and receipts were not: what was signed once stands.
    cut_back = on_a_copy(parts, (after_first[0], 3), tmp_path / "cut")
    assert await hear(cut_back, held(newest)) is Phase.TRAINING


async def test_a_node_that_only_says_so_pauses_nothing(tmp_path: Path) -> None:
    parts, after_first = await three_receipts(tmp_path / "first")
    newest = parts.journal.receipts(JOB)[-1]
    bare = receipt_pb2.ReceiptsHeld(job_id=JOB, count=99)
    forged = held(newest)
    forged.newest.sequence = 99
    for number, told in enumerate((bare, forged)):
        copy = on_a_copy(parts, after_first, tmp_path / str(number))
        assert await hear(copy, told) is Phase.TRAINING


async def test_what_another_coordinator_signed_for_a_job_of_the_same_id_is_passed_over(
    tmp_path: Path,
) -> None:
    parts, after_first = await three_receipts(tmp_path / "first")
    copy = on_a_copy(parts, after_first, tmp_path / "copy")
    others = held(receipt_record(JOB, Work(node=node_key(1), sequence=7)))
    ours = held(parts.journal.receipts(JOB)[0])
    assert of_this_coordinator(copy, [ours, others]) == {JOB: ours}
    assert await hear(copy, others) is Phase.TRAINING


async def test_a_receipt_that_cannot_be_one_is_refused(tmp_path: Path) -> None:
    parts, after_first = await three_receipts(tmp_path / "first")
    copy = on_a_copy(parts, after_first, tmp_path / "copy")
    told = held(parts.journal.receipts(JOB)[-1])
    told.newest.evaluator = b"short"
    with pytest.raises(HyperGPUError, match="a hash has 32 bytes, not 5"):
        await hear(copy, told)

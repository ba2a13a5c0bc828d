"""What a node says in its hello that it holds: of whose jobs, and whether the journal has it."""

import asyncio
from collections.abc import Iterable, Mapping

from coordinator.core.metering.accounts import account_of
from coordinator.core.metering.ahead import ahead_of_journal
from coordinator.shell.runtime.acts.perform import pause
from coordinator.shell.runtime.parts import Parts
from coordinator.shell.runtime.room import Room
from hypergpu.ids import JobId, NodeId
from hypergpu.ledger.typed import word_bytes
from hypergpu.v1 import receipt_pb2
from hypergpu.wire.ledger import receipt_value

Held = Mapping[JobId, receipt_pb2.ReceiptsHeld]


def of_this_coordinator(parts: Parts, told: Iterable[receipt_pb2.ReceiptsHeld]) -> Held:
    """What is held of each job, without jobs of other coordinators that may have the same ids."""
    ours = (each for each in told if not each.HasField("newest") or _is_ours(parts, each))
    return {JobId(each.job_id): each for each in ours}


async def pause_what_is_older(parts: Parts, node: NodeId, held: Held) -> None:
    """Pause jobs of which the node holds receipts that the journal does not have, for good.

    Raises:
        HyperGPUError: REQUEST_INVALID, a receipt is malformed.
    """
    for job_id, each in held.items():
        room = parts.driver.rooms.get(job_id)
        if room is None or not each.HasField("newest"):
            continue
        if each.newest.sequence < account_of(room.job.metering, node).receipts:
            continue
        if why := await _why_older(parts, room, node, each.newest):
            room.why_older = why
            await pause(parts, room, why)


async def _why_older(parts: Parts, room: Room, node: NodeId, newest: receipt_pb2.Receipt) -> str:
    # Of a job whose rows were cut back the journal still has what was signed.
    counts = await asyncio.to_thread(parts.journal.receipt_counts, room.job.job_id)
    return ahead_of_journal(room.job, receipt_value(newest, node), counts.get(node, 0))


def _is_ours(parts: Parts, held: receipt_pb2.ReceiptsHeld) -> bool:
    room = parts.driver.rooms.get(JobId(held.job_id))
    terms = None if room is None else room.job.terms
    return terms is not None and word_bytes(terms.job) == held.newest.job

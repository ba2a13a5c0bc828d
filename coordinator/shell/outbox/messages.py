"""Messages made of a journal's rows, and their positions. Pure.

A position never changes and is never given to anything else, so that readers drop repeats by it.
"""

from collections.abc import Iterable, Mapping

import msgspec

from coordinator.shell.store.journal.records import Entry
from hypergpu.ids import JobId, NodeId
from hypergpu.journal.events import (
    EvaluationReadyEvent,
    JobCreatedEvent,
    JobEndedEvent,
    ModelInitialisedEvent,
    RoundMeasuredEvent,
    RoundRecordedEvent,
    decode_event,
    event_kind,
)
from hypergpu.statements import SignedReceipt

SENT_KINDS = frozenset(
    event_kind(each)
    for each in (
        JobCreatedEvent,
        ModelInitialisedEvent,
        RoundRecordedEvent,
        EvaluationReadyEvent,
        JobEndedEvent,
    )
)
"""Rows that are sent as they are; the others concern nobody but the coordinator."""
MEASURED_KIND = event_kind(RoundMeasuredEvent)
"""Rows in whose place their receipts are sent."""
RECEIPT_KIND = "Receipt"
_encoder = msgspec.json.Encoder()


class StreamAwayError(Exception):
    """The stream takes nothing now; the text says why."""


class OutboxMessage(msgspec.Struct, frozen=True):
    """One entry of a stream."""

    job_id: JobId
    sequence: int
    """Row of the job's journal."""
    index: int
    """Place among the messages of the row."""
    kind: str
    at_ms: int
    """Job time."""
    body: bytes
    """JSON."""

    def fields(self) -> dict[str, str | bytes | int]:
        """The fields of its entry in a stream."""
        return {
            "position": f"{self.job_id}:{self.sequence}:{self.index}",
            "job": self.job_id,
            "sequence": self.sequence,
            "index": self.index,
            "kind": self.kind,
            "at_ms": self.at_ms,
            "body": self.body,
        }


def measured_work(row: Entry) -> Mapping[NodeId, int]:
    """Nodes whose work the row measured, in slot order, each with the round of its work."""
    if row.kind != MEASURED_KIND:
        return {}
    event = decode_event(row.kind, row.body_json)
    works = event.updates if isinstance(event, RoundMeasuredEvent) else ()
    return {work.node: work.contribution.round for work in works}


def messages_of(row: Entry, receipts: Iterable[SignedReceipt]) -> list[OutboxMessage]:
    """Messages of a row: none, itself, or the receipts that follow from it."""
    if row.kind in SENT_KINDS:
        return [OutboxMessage(row.job_id, row.sequence, 0, row.kind, row.at_ms, row.body_json)]
    return [
        OutboxMessage(
            row.job_id,
            row.sequence,
            index,
            RECEIPT_KIND,
            row.at_ms,
            _encoder.encode(signed_receipt),
        )
        for index, signed_receipt in enumerate(receipts)
    ]

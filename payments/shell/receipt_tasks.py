"""Receipts that are checked as tasks of an engine: some of a job's go in, their faults come out."""

from collections.abc import Iterator

import msgspec

from hypergpu.engine.engine import Engine, run_all
from hypergpu.engine.tasks import EngineTask
from hypergpu.ledger_terms import Terms
from hypergpu.statements import SignedReceipt
from payments.core.verify import ReceiptFile, receipt_faults

KIND = "receipts"
_A_TASK = 2_000
"""Receipts of a task: about 0.4 s, and 2 MB."""


class CheckReceipts(msgspec.Struct, frozen=True):
    """Receipts to check."""

    terms: Terms
    receipts: tuple[SignedReceipt, ...]


# JSON, as in files: MessagePack has no integers of 128 bits.
_tasks = msgspec.json.Decoder(CheckReceipts)
_faults = msgspec.json.Decoder(list[str])


def check_receipts(engine: Engine, file: ReceiptFile) -> list[str]:
    """The fault of each of a file's receipts, as `receipt_faults`, found by an engine. Blocks."""
    results = run_all(engine, list(_receipt_tasks(file)))
    return [fault for result in results for fault in _faults.decode(result)]


def compute(arguments: bytes) -> bytes:
    """Check receipts: the function of this kind of task."""
    order = _tasks.decode(arguments)
    return msgspec.json.encode(receipt_faults(order.terms, order.receipts))


def _receipt_tasks(file: ReceiptFile) -> Iterator[EngineTask]:
    for start in range(0, len(file.receipts), _A_TASK):
        order = CheckReceipts(file.terms, file.receipts[start : start + _A_TASK])
        yield EngineTask(KIND, msgspec.json.encode(order))

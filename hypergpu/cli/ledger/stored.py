"""A node's receipts and voucher as they lie on the disk: what is in the files, and what is not."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from hypergpu.ledger.receipt import SignedReceipt
from hypergpu.ledger.terms import Terms
from hypergpu.ledger.voucher import SignedVoucher, kept_voucher
from hypergpu.units import are, several

RECEIPTS_FILE, REST_FILE = "receipts.jsonl", "receipts.rest.jsonl"
"""The daemon's names; the second holds what lay behind a damage of the first."""
VOUCHER_FILE, DAMAGED_VOUCHERS = "voucher.json", "voucher.damaged-*.json"
"""The second is what the daemon found in the place of the first, and put aside."""
VOUCHER_MENDED_BY = (
    "A node that starts puts it aside and asks its coordinator for the voucher: hypergpu join; if"
    " that is gone, put back a copy of the file"
)
_SHOWN = 5
_lines = msgspec.json.Decoder(SignedReceipt)


class Stored(NamedTuple):
    """What a node has of a job's receipts."""

    receipts: list[SignedReceipt]
    """By number; a number may come twice, with two different receipts."""
    unreadable: int
    """Lines that are no receipt. One that is being written at the end is none of them."""
    missing: tuple[range, ...]
    """Numbers of receipts that were made, by the others or the newest voucher, and are not here."""

    @property
    def missing_count(self) -> int:
        """How many numbers are missing: `len` holds no range of 2^63 and more."""
        return sum(map(_size, self.missing))

    @property
    def damage(self) -> str:
        """What is not here; empty: nothing."""
        lost, count = self.unreadable, self.missing_count
        parts = [f"{several(lost, 'line')} {are(lost)} unreadable"] if lost else []
        if self.missing:
            more = len(self.missing) - _SHOWN
            named = ", ".join(_named(each) for each in self.missing[:_SHOWN])
            rest = f" and {several(more, 'more range')}" if more > 0 else ""
            parts.append(f"{several(count, 'receipt')} {are(count)} missing: {named}{rest}")
        return "; ".join(parts)


def stored_receipts(folder: Path, vouched: int) -> Stored:
    """Read a job's receipts; the daemon may be running.

    Args:
        folder: Of the job.
        vouched: How many receipts the newest voucher counts.

    Raises:
        OSError: a file cannot be read.
    """
    found: list[SignedReceipt] = []
    unreadable = 0
    for name in (RECEIPTS_FILE, REST_FILE):
        path = folder / name
        whole = path.read_bytes().rpartition(b"\n")[0] if path.exists() else b""
        for line in whole.split(b"\n") if whole else ():
            try:
                found.append(_lines.decode(line))
            except (msgspec.MsgspecError, UnicodeError):
                # What was put aside has been asked for again: it counts where it can be read.
                unreadable += name == RECEIPTS_FILE
    receipts = _each_once(found)
    numbers = [signed.receipt.sequence for signed in receipts]
    return Stored(receipts, unreadable, tuple(_gaps(numbers, vouched)))


class StoredVoucher(NamedTuple):
    """The newest voucher of a job, if its file is sound."""

    signed: SignedVoucher | None
    damage: str = ""
    """Which file holds no voucher, why, and what mends it; empty: none is damaged."""


def stored_voucher(folder: Path, terms: Terms) -> StoredVoucher:
    """Read a job's voucher, and see whether it is what its coordinator signed."""
    path = folder / VOUCHER_FILE
    if not path.exists():
        aside = sorted(folder.glob(DAMAGED_VOUCHERS))
        if not aside:
            return StoredVoucher(None)
        why = f"{aside[-1]} holds no voucher, and none has come since. {VOUCHER_MENDED_BY}"
        return StoredVoucher(None, why)
    try:
        return StoredVoucher(kept_voucher(path.read_bytes(), terms))
    except (OSError, ValueError) as broken:
        return StoredVoucher(None, f"{path}: {broken}. {VOUCHER_MENDED_BY}")


def _each_once(found: Sequence[SignedReceipt]) -> list[SignedReceipt]:
    kept: dict[tuple[int, bytes], SignedReceipt] = {}
    for signed in found:
        kept.setdefault((signed.receipt.sequence, msgspec.json.encode(signed.receipt)), signed)
    return sorted(kept.values(), key=lambda signed: signed.receipt.sequence)


def _gaps(numbers: Sequence[int], end: int) -> Iterable[range]:
    """What is missing of the numbers from 0 to an end, or to the last that is there."""
    following = 0
    for number in [*numbers, max(end, numbers[-1] + 1 if numbers else 0)]:
        if number > following:
            yield range(following, number)
        following = max(following, number + 1)


def _size(numbers: range) -> int:
    return numbers.stop - numbers.start


def _named(numbers: range) -> str:
    if _size(numbers) == 1:
        return f"number {numbers.start}"
    return f"numbers {numbers.start} to {numbers.stop - 1}"

"""What a node can show for its work: receipts and vouchers, checked before they are kept.

Each job has a folder that outlives the job::

    terms.json      for whom and where its work counts, as it was agreed when the work was done
    receipts.jsonl  signed receipts with their contributions, a line each, in order, none left out
    voucher.json    the newest voucher
    conflict.json   a receipt under a number that another one has: only a coordinator that cheats
                    signs one, and the two together prove it

A line that was not written to its end is cut off: its receipt is asked for again.
"""

import os
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import msgspec
import structlog

from gpu_node.shell.state.places import Places
from hypergpu.files.durable import write_durably
from hypergpu.ids import JobId, NodeId
from hypergpu.ledger.receipt import ReceiptCheck, SignedReceipt, Signers
from hypergpu.ledger.terms import Terms, separator_of
from hypergpu.ledger.typed import signer
from hypergpu.ledger.voucher import SignedVoucher, no_voucher, voucher_fault
from hypergpu.refusal import Reason, RefusalError

log = structlog.get_logger()

TERMS_FILE = "terms.json"
RECEIPTS_FILE = "receipts.jsonl"
VOUCHER_FILE = "voucher.json"
CONFLICT_FILE = "conflict.json"
_lines = msgspec.json.Decoder(SignedReceipt)


class Kept(NamedTuple):
    """What a node holds of one job."""

    terms: Terms
    receipts: tuple[SignedReceipt, ...]
    voucher: SignedVoucher | None


class Wallet:
    """Keeps what the coordinator signs for one node. Any thread may call; calls block."""

    def __init__(self, places: Places, node: NodeId) -> None:
        self._root = places.ledger
        self._node = node
        self._lock = threading.Lock()
        self._terms: dict[JobId, Terms] = {}
        self._counts: dict[JobId, int] = {}
        self._vouchers: dict[JobId, SignedVoucher] = {}
        self._places = places
        for folder in sorted(self._root.iterdir()) if self._root.is_dir() else ():
            self._load(JobId(folder.name), folder)

    def held(self) -> dict[JobId, int]:
        """How many receipts there are of each job."""
        with self._lock:
            return dict(self._counts)

    def agree(self, job_id: JobId, terms: Terms) -> None:
        """Remember what the work of a job is done for, before it is sent."""
        with self._lock:
            if terms == Terms() or self._terms.get(job_id) == terms:
                return
            folder = self._places.ledger_of(job_id)
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            write_durably(folder / TERMS_FILE, msgspec.json.encode(terms))
            self._terms[job_id] = terms
            self._counts.setdefault(job_id, 0)

    def take(self, job_id: JobId, receipts: Iterable[SignedReceipt]) -> None:
        """Keep receipts that are sound and follow on; repeated ones are passed over.

        One that says something else than the receipt before under its number is kept as a proof.

        Raises:
            RefusalError: SIGNATURE_INVALID, one is not what the coordinator owes this node; those
                before it are kept.
            OSError: the disk fails.
        """
        with self._lock:
            terms = self._agreed(job_id)
            signers = Signers(
                coordinator=terms.coordinator, domain=terms.domain, made_in=terms.domain
            )
            check = ReceiptCheck(signers)
            sound: list[SignedReceipt] = []
            again: list[SignedReceipt] = []
            fault = ""
            for signed in receipts:
                wanted = self._counts[job_id] + len(sound)
                if signed.receipt.sequence < wanted:
                    again.append(signed)
                    continue
                if fault := self._fault(check, signed, terms, wanted):
                    break
                sound.append(signed)
            self._append(job_id, sound)
            if again:
                self._compare(job_id, again, terms)
        if fault:
            detail = f"a receipt of {job_id} is not kept: {fault}"
            raise RefusalError(Reason.SIGNATURE_INVALID, detail)

    def take_voucher(self, job_id: JobId, signed: SignedVoucher) -> None:
        """Keep a voucher that is worth as much as the one before at least.

        Raises:
            RefusalError: SIGNATURE_INVALID, it is not; the one before stays.
            OSError: the disk fails.
        """
        with self._lock:
            terms, before = self._agreed(job_id), self._vouchers.get(job_id)
            held = before.voucher if before else no_voucher(terms.job, self._node)
            if signed.voucher == held:
                return
            fault = voucher_fault(
                signed,
                separator=separator_of(terms.domain),
                coordinator=terms.coordinator,
                held=held,
            )
            if fault:
                detail = f"a voucher of {job_id} is not kept: {fault}"
                raise RefusalError(Reason.SIGNATURE_INVALID, detail)
            path = self._places.ledger_of(job_id) / VOUCHER_FILE
            write_durably(path, msgspec.json.encode(signed))
            self._vouchers[job_id] = signed

    def _compare(self, job_id: JobId, again: Iterable[SignedReceipt], terms: Terms) -> None:
        """Keep the first receipt that contradicts one of the same number."""
        folder = self._places.ledger_of(job_id)
        kept, path = kept_in(folder), folder / CONFLICT_FILE
        if kept is None or path.exists():
            return
        separator = separator_of(terms.domain)
        for signed in again:
            receipt = signed.receipt
            if receipt == kept.receipts[receipt.sequence].receipt:
                continue
            is_ours = (receipt.job, receipt.node) == (terms.job, self._node)
            if is_ours and signer(separator, receipt, signed.signature) == terms.coordinator:
                write_durably(path, msgspec.json.encode(signed))
                log.error(
                    "the coordinator signed two receipts for one number",
                    job_id=job_id,
                    sequence=receipt.sequence,
                    fix="hypergpu ledger dispute",
                )
                return

    def _fault(self, check: ReceiptCheck, signed: SignedReceipt, terms: Terms, wanted: int) -> str:
        receipt = signed.receipt
        if receipt.sequence != wanted:
            return f"it is number {receipt.sequence} where {wanted} is next"
        if (receipt.job, receipt.node) != (terms.job, self._node):
            return "it is for another job or node"
        return check.fault(signed)

    def _agreed(self, job_id: JobId) -> Terms:
        terms = self._terms.get(job_id)
        if terms is None:
            detail = f"this node agreed to no terms of {job_id[:80]!r}"
            raise RefusalError(Reason.SIGNATURE_INVALID, detail)
        return terms

    def _append(self, job_id: JobId, sound: list[SignedReceipt]) -> None:
        if not sound:
            return
        path = self._places.ledger_of(job_id) / RECEIPTS_FILE
        mode = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        with os.fdopen(os.open(path, mode, 0o600), "ab") as file:
            before = file.tell()
            try:
                file.write(msgspec.json.Encoder().encode_lines(sound))
                file.flush()
                os.fsync(file.fileno())
            except OSError:
                os.ftruncate(file.fileno(), before)
                raise
        self._counts[job_id] += len(sound)

    def _load(self, job_id: JobId, folder: Path) -> None:
        kept = kept_in(folder)
        if kept is None:
            log.error("what a job owes cannot be read and rests", folder=str(folder))
            return
        self._terms[job_id] = kept.terms
        self._counts[job_id] = len(kept.receipts)
        if kept.voucher is not None:
            self._vouchers[job_id] = kept.voucher
        whole = sum(len(msgspec.json.encode(each)) + 1 for each in kept.receipts)
        path = folder / RECEIPTS_FILE
        if path.exists() and path.stat().st_size != whole:
            log.warning("receipts are cut back to the last whole one", file=str(path))
            os.truncate(path, whole)


def kept_in(folder: Path) -> Kept | None:
    """What is kept of one job, up to the first line that is no receipt; None without its terms."""
    try:
        terms = msgspec.json.decode((folder / TERMS_FILE).read_bytes(), type=Terms)
    except (OSError, msgspec.MsgspecError):
        return None
    try:
        lines = (folder / RECEIPTS_FILE).read_bytes().split(b"\n")
    except FileNotFoundError:
        lines = []
    receipts: list[SignedReceipt] = []
    for line in lines[:-1]:
        try:
            receipts.append(_lines.decode(line))
        except msgspec.MsgspecError:
            break
    return Kept(terms, tuple(receipts), _voucher(folder / VOUCHER_FILE))


def _voucher(path: Path) -> SignedVoucher | None:
    try:
        return msgspec.json.decode(path.read_bytes(), type=SignedVoucher)
    except (OSError, msgspec.MsgspecError):
        return None

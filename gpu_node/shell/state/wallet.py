"""What a node can show for its work: receipts and vouchers, checked before they are kept.

Each job has a folder that outlives the job. It is named by the job's id and by who signs for it, so
that no coordinator reaches what another one owes::

    terms.json      for whom and where its work counts, as it was agreed when the work was done
    receipts.jsonl  signed receipts with their contributions, a line each, in order, none left out
    voucher.json    the newest voucher
    conflict.json   a receipt under a number that another one has: only a coordinator that cheats
                    signs one, and the two together prove it
    receipts.rest.jsonl
                    what a damaged receipts.jsonl held behind its first missing or unreadable line
    voucher.damaged-1.json
                    what lay as voucher.json and was no voucher that the coordinator signed

From the first line on that is cut, damaged or missing, receipts are asked for again. What lies
behind it is put aside and still counts, for its coordinator may be gone. A voucher comes with each
receipt: who lacks its voucher asks for its last receipt again.
"""

import os
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import msgspec
import structlog

from gpu_node.shell.state.kept import (
    CONFLICT_FILE,
    DAMAGED_VOUCHERS,
    RECEIPTS_FILE,
    TERMS_FILE,
    VOUCHER_FILE,
    Kept,
    contradiction,
    job_of,
    kept_in,
    put_aside,
    put_damaged_aside,
)
from gpu_node.shell.state.places import OWNER_MARK, Places
from hypergpu.errors import HyperGPUError, Reason
from hypergpu.files import write_durably
from hypergpu.ids import JobId, JobKey, NodeId
from hypergpu.ledger.receipt import ReceiptCheck, SignedReceipt, Signers
from hypergpu.ledger.terms import Terms, separator_of
from hypergpu.ledger.typed import Domain, signer
from hypergpu.ledger.voucher import SignedVoucher, no_voucher, voucher_fault

log = structlog.get_logger()

_FIX_OF_TERMS = "take what it owes: hypergpu ledger claim; and ask its operator why they changed"
_FIX_OF_LOST = (
    "none is needed while the coordinator has the job: it names them again; else put back a copy"
    " of the file"
)
_FIX_OF_SIGNED = (
    "ask its operator whether its key or its journal was put back from a copy; what this node"
    " holds stays good"
)


class Standing(NamedTuple):
    """How far the receipts of one job go."""

    job_id: JobId
    receipts: int
    newest: SignedReceipt | None
    """The last of them."""
    lacks_voucher: bool = False
    """The voucher was damaged or lost, and none has come since."""


class _Job:
    """What is kept of one job, in memory, and where the rest of it lies."""

    def __init__(self, job_id: JobId, folder: Path, kept: Kept) -> None:
        self.job_id = job_id
        self.folder = folder
        self.terms = kept.terms
        self.voucher = kept.voucher
        self.count = len(kept.receipts)
        self.newest = kept.receipts[-1] if kept.receipts else None
        is_lost = bool(kept.terms.domain.chain_id) or any(folder.glob(DAMAGED_VOUCHERS))
        self.lacks_voucher = kept.voucher is None and bool(kept.receipts) and is_lost
        """Until it was asked for once: a job that pays nothing has none."""


class Wallet:
    """Keeps what coordinators sign for one node. Any thread may call; calls block."""

    def __init__(self, places: Places, node: NodeId) -> None:
        self._node = node
        self._lock = threading.Lock()
        self._jobs: dict[JobKey, _Job] = {}
        """Those that were written to last come last."""
        self._places = places
        root = places.ledger
        folders = list(root.iterdir()) if root.is_dir() else []
        for folder in sorted(folders, key=lambda each: (each.stat().st_mtime_ns, each.name)):
            self._load(folder)

    def held(self) -> tuple[Standing, ...]:
        """What there is of each job; those that were written to last come last."""
        with self._lock:
            return tuple(
                Standing(job.job_id, job.count, job.newest, job.lacks_voucher)
                for job in self._jobs.values()
            )

    def changed_terms(self, job_id: JobId, terms: Terms) -> str:
        """Why no work is done for these terms; empty: the job is new, or they are its own."""
        with self._lock:
            return self._changed_terms(job_id, terms)

    def agree(self, job_id: JobId, terms: Terms) -> None:
        """Remember what the work of a job is done for, before it is sent.

        Raises:
            HyperGPUError: REQUEST_INVALID, the job's terms were others before; those stay.
            OSError: the disk fails.
        """
        with self._lock:
            if terms == Terms():
                return
            if changed := self._changed_terms(job_id, terms):
                raise HyperGPUError(Reason.REQUEST_INVALID, changed, fix=_FIX_OF_TERMS)
            self._begin(job_id, terms)

    def agree_again(self, job_id: JobId, terms: Terms, receipt: SignedReceipt) -> None:
        """Take a job up again whose terms were lost. Terms that are known stay as they are.

        Args:
            job_id: Of the job.
            terms: As its coordinator names them now.
            receipt: Of the job. That this node signed its work for those very terms proves them.

        Raises:
            HyperGPUError: SIGNATURE_INVALID, they are not proven, or contradict what is held.
            OSError: the disk fails.
        """
        with self._lock:
            if terms.job in self._jobs:
                return
            fault = "" if terms.is_of(job_id) else "they are another job's"
            fault = fault or self._fault(_check(terms), receipt, terms, receipt.receipt.sequence)
            if fault := fault or self._changed_terms(job_id, terms):
                detail = f"the terms of {job_id[:80]!r} are not taken up again: {fault}"
                raise HyperGPUError(Reason.SIGNATURE_INVALID, detail, fix=_FIX_OF_SIGNED)
            self._begin(job_id, terms)
            log.warning("a job's terms were lost and are as its coordinator says", job_id=job_id)

    def take(self, job_id: JobId, receipts: Iterable[SignedReceipt]) -> None:
        """Keep receipts that are sound and follow on; repeated ones are passed over.

        One that says something else than the receipt before under its number is kept as a proof.

        Raises:
            HyperGPUError: SIGNATURE_INVALID, one is not what the coordinator owes this node; those
                before it are kept.
            OSError: the disk fails.
        """
        given = tuple(receipts)
        if not given:
            return
        with self._lock:
            job = self._agreed(job_id, given[0].receipt.job)
            job.lacks_voucher = False
            check = _check(job.terms)
            sound: list[SignedReceipt] = []
            again: list[SignedReceipt] = []
            fault = ""
            for signed in given:
                wanted = job.count + len(sound)
                if signed.receipt.sequence < wanted:
                    again.append(signed)
                    continue
                if fault := self._fault(check, signed, job.terms, wanted):
                    break
                sound.append(signed)
            _append(job, sound)
            if again:
                self._compare(job, again)
        if fault:
            detail = f"a receipt of {job_id} is not kept: {fault}"
            raise HyperGPUError(Reason.SIGNATURE_INVALID, detail, fix=_FIX_OF_SIGNED)

    def take_voucher(self, job_id: JobId, signed: SignedVoucher) -> None:
        """Keep a voucher that is worth as much as the one before at least.

        Raises:
            HyperGPUError: SIGNATURE_INVALID, it is not; the one before stays.
            OSError: the disk fails.
        """
        with self._lock:
            job = self._agreed(job_id, signed.voucher.job)
            held = job.voucher.voucher if job.voucher else no_voucher(job.terms.job, self._node)
            if signed.voucher == held:
                return
            fault = voucher_fault(
                signed,
                separator=separator_of(job.terms.domain),
                coordinator=job.terms.coordinator,
                held=held,
            )
            if fault:
                detail = f"a voucher of {job_id} is not kept: {fault}"
                raise HyperGPUError(Reason.SIGNATURE_INVALID, detail, fix=_FIX_OF_SIGNED)
            write_durably(job.folder / VOUCHER_FILE, msgspec.json.encode(signed))
            job.voucher, job.lacks_voucher = signed, False

    def _changed_terms(self, job_id: JobId, terms: Terms) -> str:
        job = self._jobs.get(terms.job)
        if job is None:
            return self._contradiction(job_id, terms)
        if job.terms == terms:
            return ""
        return (
            f"{job_id} counts on {_shown(job.terms.domain)} by what this node has of it, and now it"
            f" is to count on {_shown(terms.domain)}: what it owes already would be lost"
        )

    def _contradiction(self, job_id: JobId, terms: Terms) -> str:
        """The same of a job whose own terms were lost, by the receipts that lie there."""
        folder = self._places.ledger_of(job_id, terms.coordinator)
        if not (fault := contradiction(folder, terms)):
            return ""
        return f"the receipts in {folder} were made for other terms than these: {fault}"

    def _begin(self, job_id: JobId, terms: Terms) -> None:
        """Write the terms of a job that has none, and load what lies there."""
        if terms.job in self._jobs:
            return
        folder = self._places.ledger_of(job_id, terms.coordinator)
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        path = folder / TERMS_FILE
        if path.exists():
            put_aside(path)
        write_durably(path, msgspec.json.encode(terms))
        self._load(folder)

    def _compare(self, job: _Job, again: Iterable[SignedReceipt]) -> None:
        """Keep the first receipt that contradicts one of the same number."""
        kept, path = kept_in(job.folder, self._node), job.folder / CONFLICT_FILE
        if kept is None or path.exists():
            return
        terms, separator = job.terms, separator_of(job.terms.domain)
        for signed in again:
            receipt = signed.receipt
            if receipt.sequence >= len(kept.receipts):
                continue  # The file was damaged since: it is mended at the next start.
            if receipt == kept.receipts[receipt.sequence].receipt:
                continue
            is_ours = (receipt.job, receipt.node) == (terms.job, self._node)
            if is_ours and signer(separator, receipt, signed.signature) == terms.coordinator:
                write_durably(path, msgspec.json.encode(signed))
                log.error(
                    "the coordinator signed two receipts for one number",
                    job_id=job.job_id,
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

    def _agreed(self, job_id: JobId, key: JobKey) -> _Job:
        """The job that something is signed for."""
        mine = [job for job in self._jobs.values() if job.job_id == job_id]
        if not mine:
            detail = f"this node agreed to no terms of {job_id[:80]!r}"
            raise HyperGPUError(Reason.SIGNATURE_INVALID, detail)
        if key not in {job.terms.job for job in mine}:
            detail = f"something signed for {job_id} is not kept: it is for another job or node"
            raise HyperGPUError(Reason.SIGNATURE_INVALID, detail)
        return self._jobs[key]

    def _load(self, folder: Path) -> None:
        kept = kept_in(folder, self._node)
        if kept is None:
            log.error(
                "a job's terms cannot be read: what it owes rests",
                file=str(folder / TERMS_FILE),
                fix=_FIX_OF_LOST,
            )
            return
        job_id = job_of(folder)
        if kept.terms.job in self._jobs:
            log.error("what a job owes lies in two folders, one rests", folder=str(folder))
            return
        if OWNER_MARK not in folder.name:
            folder = self._moved(folder, job_id, kept.terms)
        put_damaged_aside(folder, kept)
        self._jobs[kept.terms.job] = _Job(job_id, folder, kept)

    def _moved(self, folder: Path, job_id: JobId, terms: Terms) -> Path:
        """Name a folder as they are named now: an older version left its owner out."""
        try:
            return folder.rename(self._places.ledger_of(job_id, terms.coordinator))
        except OSError as broken:
            log.warning("a folder keeps its older name", folder=str(folder), reason=str(broken))
            return folder


def _check(terms: Terms) -> ReceiptCheck:
    domain = terms.domain
    return ReceiptCheck(Signers(coordinator=terms.coordinator, domain=domain, made_in=domain))


def _append(job: _Job, sound: list[SignedReceipt]) -> None:
    if not sound:
        return
    path = job.folder / RECEIPTS_FILE
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
    job.count += len(sound)
    job.newest = sound[-1]


def _shown(domain: Domain) -> str:
    if not domain.chain_id:
        return "no chain"
    return f"chain {domain.chain_id}, contract {domain.contract}"

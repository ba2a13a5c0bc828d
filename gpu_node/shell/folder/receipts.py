"""Keeps the newest receipt of each job, which alone proves all that the node has earned in it.

Each job has a folder that outlives the job, named by the job's key, which contains its coordinator:
no coordinator reaches another's. Files are replaced whole and durably::

    ledger/<job key>/terms.json    {"job_id": TEXT, "terms": Terms}    what the work is signed under
    ledger/<job key>/newest.json   SignedReceipt                       the newest sound receipt
    ledger/<job key>/tally.json    {"accepted": N, "samples": N, "last_round": N}
                                   the node's own count of its accepted updates

`hypergpu ledger claim` reads these files. The node's own count is compared with each receipt: a
coordinator that counts less than it accepted is named in a warning. A damaged file is put aside
under the same name with ``.damaged``; the coordinator sends the newest receipt again.
"""

import threading
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

import msgspec
import structlog

from gpu_node.shell.folder.state import StatePaths
from hypergpu.durable import write_durably
from hypergpu.errors import HyperGPUError, Reason
from hypergpu.ids import JobId, NodeId
from hypergpu.ledger_terms import Domain, JobTerms, Terms
from hypergpu.node_report import EarnedReport, EarnedUnits
from hypergpu.statements import SignedReceipt, receipt_fault
from hypergpu.work_units import WorkUnit

log = structlog.get_logger()

TERMS_FILE, NEWEST_FILE, TALLY_FILE = "terms.json", "newest.json", "tally.json"
SILENT_S = 24 * 3600
"""A coordinator that does not answer for so long is named in a warning, once a day."""
_UNMEASURED_MOST = 16
"""Accepted updates whose receipts may still be to come: a coordinator measures rounds in order."""
_SHOWN_MOST = 1_000
"""Newest receipts that a hello shows; about 500 KB."""
_FULL_QUALITY_BPS = 10_000
_CLAIM = "take what is owed: hypergpu ledger claim"
_Content = TypeVar("_Content")


class OwnTally(msgspec.Struct, frozen=True):
    """Updates of this node that the coordinator has accepted in one job."""

    accepted: int = 0
    samples: int = 0
    last_round: int = -1
    """Newest round counted: an acceptance that is repeated counts once."""


class _Account:
    """One job's folder and what its files hold."""

    def __init__(self, folder: Path, held: JobTerms) -> None:
        self.folder = folder
        self.job_id, self.terms = held.job_id, held.terms
        self.newest = _read_file(folder / NEWEST_FILE, SignedReceipt)
        self.tally = _read_file(folder / TALLY_FILE, OwnTally) or OwnTally()
        self.is_warned_of = False


class ReceiptKeeper:
    """Receipts of one node. Any thread may call; calls block."""

    def __init__(self, paths: StatePaths, node: NodeId) -> None:
        self._paths = paths
        self.node = node
        self._lock = threading.Lock()
        self._accounts: dict[str, _Account] = {}
        self._answered_s = time.monotonic()
        root = paths.ledger
        folders = [each for each in root.iterdir() if each.is_dir()] if root.is_dir() else []
        for folder in sorted(folders, key=lambda each: (each.stat().st_mtime_ns, each.name)):
            held_terms = _read_file(folder / TERMS_FILE, JobTerms)
            if held_terms is not None and held_terms.terms.job == folder.name:
                self._accounts[held_terms.terms.job] = _Account(folder, held_terms)

    def newest(self) -> tuple[tuple[JobId, SignedReceipt], ...]:
        """The newest receipt of each job, for a hello; of the jobs that were at work last."""
        with self._lock:
            newest_receipts = [
                (account.job_id, account.newest)
                for account in self._accounts.values()
                if account.newest is not None
            ]
        return tuple(newest_receipts[-_SHOWN_MOST:])

    def earnings(self) -> EarnedReport:
        """What the newest receipts say that the node earned, by unit."""
        with self._lock:
            held_receipts = [(each.terms, each.newest) for each in self._accounts.values()]
        receipts = 0
        chain_units, free_units = Counter[WorkUnit](), Counter[WorkUnit]()
        for terms, signed_receipt in held_receipts:
            if signed_receipt is None:
                continue
            receipts += signed_receipt.receipt.sequence + 1
            units = signed_receipt.receipt.total_score // _FULL_QUALITY_BPS
            (chain_units if terms.domain.chain_id else free_units)[terms.unit] += units
        return EarnedReport(
            receipts,
            chain_units.pop(WorkUnit.SAMPLES, 0),
            free_units.pop(WorkUnit.SAMPLES, 0),
            tuple(
                EarnedUnits(unit.value, chain_units[unit], free_units[unit])
                for unit in WorkUnit
                if chain_units[unit] or free_units[unit]
            ),
        )

    def changed_terms(self, job_id: JobId, terms: Terms) -> str:
        """Why no work is done under these terms; empty if they are the job's or it is new."""
        with self._lock:
            account = self._accounts.get(terms.job) or self._account_of(job_id, terms)
        if account is None or account.terms == terms:
            return ""
        if account.terms.unit is not terms.unit:
            before_unit, unit = account.terms.unit.value, terms.unit.value
            return (
                f"{job_id} counts {before_unit} by this node's records, and now {unit}: no job"
                " mixes two units; ask its operator why it changed"
            )
        before, now = _ledger_name(account.terms.domain), _ledger_name(terms.domain)
        return (
            f"{job_id} counts on {before} by this node's records, and now on {now}: {_CLAIM};"
            " and ask its operator why the ledger changed"
        )

    def _account_of(self, job_id: JobId, terms: Terms) -> _Account | None:
        """The account of a job by another key of the same coordinator."""
        accounts = self._accounts.values()
        return next(
            (
                account
                for account in accounts
                if account.job_id == job_id and account.terms.coordinator == terms.coordinator
            ),
            None,
        )

    def agree(self, job_id: JobId, terms: Terms) -> None:
        """Keep a job's terms before work is sent under them.

        Raises:
            HyperGPUError: REQUEST_INVALID, the job had other terms before; those stay.
            OSError: The disk fails.
        """
        if difference := self.changed_terms(job_id, terms):
            raise HyperGPUError(Reason.REQUEST_INVALID, difference)
        with self._lock:
            if terms == Terms() or terms.job in self._accounts:
                return
            folder = self._paths.ledger_of(terms.job)
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            job_terms = JobTerms(job_id, terms)
            write_durably(folder / TERMS_FILE, msgspec.json.encode(job_terms))
            self._accounts[terms.job] = _Account(folder, job_terms)

    def count_accepted(self, terms: Terms, round_number: int, samples: int) -> None:
        """Count an accepted update of a round, once.

        Raises:
            OSError: The disk fails.
        """
        with self._lock:
            account = self._accounts.get(terms.job)
            if account is None or round_number <= account.tally.last_round:
                return
            before = account.tally
            tally = OwnTally(before.accepted + 1, before.samples + samples, round_number)
            write_durably(account.folder / TALLY_FILE, msgspec.json.encode(tally))
            account.tally = tally

    def take(
        self, job_id: JobId, receipts: Sequence[SignedReceipt], terms: Terms | None = None
    ) -> None:
        """Keep the newest of these receipts if it is sound and newer than the one before.

        Args:
            job_id: The job.
            receipts: Of that job and this node, in ascending order.
            terms: The job's terms, for a node that has lost them: the node's own signature of a
                contribution proves them.

        Raises:
            HyperGPUError: SIGNATURE_INVALID, the coordinator does not owe it to this node.
            OSError: The disk fails.
        """
        if not receipts:
            return
        newest_receipt = max(receipts, key=lambda each: each.receipt.sequence)
        held_account = self._accounts.get(newest_receipt.receipt.job)
        known_terms = terms if held_account is None else held_account.terms
        if fault := self._fault(job_id, newest_receipt, known_terms) or known_terms is None:
            detail = f"a receipt of {job_id[:80]} is not kept: {fault}"
            fix = "ask its operator whether its key or journal was put back from a copy"
            raise HyperGPUError(Reason.SIGNATURE_INVALID, detail, fix=fix)
        self.agree(job_id, known_terms)
        with self._lock:
            account = self._accounts[known_terms.job]
            if _is_newer(newest_receipt, account.newest):
                write_durably(account.folder / NEWEST_FILE, msgspec.json.encode(newest_receipt))
                account.newest = newest_receipt
                # The jobs at work last come last.
                self._accounts[known_terms.job] = self._accounts.pop(known_terms.job)
            self._warn_of_undercount(account)

    def note_answer(self) -> None:
        """Note that the coordinator answers."""
        self._answered_s = time.monotonic()

    def warn_of_silence(self) -> None:
        """Warn, once a day, of a coordinator that holds unpaid receipts and does not answer."""
        if time.monotonic() - self._answered_s < SILENT_S or not self.newest():
            return
        self._answered_s = time.monotonic()
        log.warning("the coordinator has not answered for a day; receipts stay good", fix=_CLAIM)

    def _fault(self, job_id: JobId, signed: SignedReceipt, terms: Terms | None) -> str:
        if terms is None:
            return "this node knows no terms of its job"
        if signed.receipt.node != self.node or signed.receipt.job != terms.job:
            return "it is for another job or node"
        if not terms.match(job_id):
            return "its terms are another job's"
        return receipt_fault(signed, terms.domain, terms.coordinator)

    def _warn_of_undercount(self, account: _Account) -> None:
        if account.newest is None:
            return
        receipt_count, accepted_updates = (
            account.newest.receipt.sequence + 1,
            account.tally.accepted,
        )
        if receipt_count + _UNMEASURED_MOST < accepted_updates and not account.is_warned_of:
            account.is_warned_of = True
            log.warning(
                "the coordinator gives fewer receipts than it accepted updates",
                job_id=account.job_id,
                receipts=receipt_count,
                accepted=accepted_updates,
                fix=_CLAIM,
            )


def _is_newer(signed: SignedReceipt, before: SignedReceipt | None) -> bool:
    """Whether a receipt replaces the one before: a lower total score never does."""
    if before is None:
        return True
    new, old = signed.receipt, before.receipt
    return new.sequence > old.sequence and new.total_score >= old.total_score


def _read_file(path: Path, type_: type[_Content]) -> _Content | None:
    """A file's content; a damaged file is put aside."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=type_)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        log.warning("a damaged file is put aside", file=str(path), reason=str(error))
        with suppress(OSError):
            path.rename(path.with_name(path.name + ".damaged"))
        return None


def _ledger_name(domain: Domain) -> str:
    if not domain.chain_id:
        return "no chain"
    return f"chain {domain.chain_id}, contract {domain.contract}"

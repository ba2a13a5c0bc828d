"""Whether a job's escrow covers work before it is done, so that nobody works unpaid."""

import threading
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import structlog

from coordinator.core.metering.judging import WAITING_MAX
from coordinator.core.settlement.epoch import EpochState, Part
from coordinator.core.settlement.sending import TransactionState
from coordinator.core.settlement.shortfall import shortfall
from coordinator.shell.chain.reading.advances import AdvanceReader, Advances
from coordinator.shell.chain.reading.ending import Ending, ending_of
from coordinator.shell.chain.site import LedgerSite
from coordinator.shell.journal.ledger.interface import Outbox
from coordinator.shell.journal.ledger.records import EpochRecord
from hypergpu.chain.ledger import JobOnChain
from hypergpu.chain.rpc.answers import Block
from hypergpu.ids import JobId, NodeId
from hypergpu.ledger.pay import PRICED_SCORE

log = structlog.get_logger()

_CLOSED = frozenset({EpochState.CONFIRMED, EpochState.PAID, EpochState.FINAL})
_ROUNDS = 2 + WAITING_MAX
"""The next, and those that vouchers are an advance on: the open one, and what is not judged yet."""
_RARELY_BLOCKS = 64
_WITHOUT_EFFECT = [TransactionState.WAITING, TransactionState.FAILED]


class EscrowReading(NamedTuple):
    """A job's money, in the token's smallest units, as of one block."""

    free: int
    """On the ledger, reserved by nothing."""
    owed: int
    """Of it, what kept receipts earn that no closed epoch has counted yet, and what short epochs
    left, less what redeemed vouchers have paid of both: that has left the escrow already."""
    height: int
    coming: int = 0
    """Reserved for shares that are due, and had by their nodes: free again once those are paid."""
    had: Mapping[NodeId, int] = {}
    """By node, what its voucher is good for no more. Known only where the escrow is tight."""
    ending: Ending | None = None
    """When the job ends there; None: nobody has announced that."""
    is_over: bool = False
    """Nothing new of it is recorded any more."""
    unrecorded: str = ""
    """What is to be said of receipts that came too late."""

    @property
    def left(self) -> int:
        """What new work may cost."""
        return max(0, self.free + self.coming - self.owed)


class Advanced(NamedTuple):
    """What a job's vouchers can go ahead of receipts by."""

    round_cost: int = 0
    """Of its newest round, at most."""
    nodes: frozenset[NodeId] = frozenset()
    """That hold one."""


class _Seen(NamedTuple):
    """What one block says, by its hash."""

    block: bytes
    is_ledger_paused: bool
    jobs: dict[JobId, JobOnChain | None]


class EscrowBook:
    """The newest reading of each job that pays. Asked by any thread, kept by the pipeline's."""

    def __init__(self, outbox: Outbox, *, rarely_blocks: int = _RARELY_BLOCKS) -> None:
        """Ask nothing yet.

        Args:
            outbox: Of the journal.
            rarely_blocks: After how many blocks a job is looked at again that is over, and was
                closed short: only vouchers of its nodes change it yet.
        """
        self._outbox = outbox
        self._rarely_blocks = rarely_blocks
        self._advances = AdvanceReader(outbox)
        self._lock = threading.Lock()
        self._followed: set[JobId] = set()
        self._readings: dict[JobId, EscrowReading] = {}
        self._advanced: dict[JobId, Advanced] = {}
        self._over: dict[JobId, int] = {}
        """Jobs that have ended and are settled, by the height at which they were looked at last."""
        self._seen = _Seen(b"", False, {})
        self._short: set[JobId] | None = None
        """Jobs with epochs that were closed short; None: not looked up since the start."""
        self._shortfalls: dict[JobId, str] = {}
        self._endings: dict[JobId, Ending] = {}
        """Of the jobs whose end was announced when they were asked for last."""
        self._unrecorded: dict[JobId, str] = {}

    def follow(self, job_id: JobId) -> None:
        """Read this job's escrow from now on."""
        with self._lock:
            self._followed.add(job_id)
            self._over.pop(job_id, None)

    def reading(self, job_id: JobId) -> EscrowReading | None:
        """What is known of a job's escrow; None: the chain was not reached since the start."""
        with self._lock:
            return self._readings.get(job_id)

    def expect(self, job_id: JobId, advanced: Advanced) -> None:
        """Take into account what vouchers can take out of a job's escrow, before any is handed out.

        Who has no receipt yet is known by nothing else.
        """
        with self._lock:
            self._advanced[job_id] = advanced

    @property
    def shortfalls(self) -> tuple[str, ...]:
        """What is to be said of epochs that were closed short, by the newest look."""
        return tuple(self._shortfalls.values())

    def over(self, at_s: int) -> frozenset[JobId]:
        """Jobs of which nothing new is recorded at a time of the chain, as far as is known."""
        return frozenset(one.job_id for one in self._endings.values() if one.is_over(at_s))

    def unrecorded(self, at_s: int) -> tuple[str, ...]:
        """What is to be said, at a time of the chain, of receipts that came too late.

        Once the owner may take back the escrow, nobody can do anything about them.
        """
        return tuple(
            words
            for job_id, words in self._unrecorded.items()
            if at_s < self._endings[job_id].ends_at_s
        )

    def watch(self, jobs: Iterable[JobId]) -> None:
        """Tell of these jobs, whose epochs were closed short, until nothing of it is lacking."""
        if self._short is None:
            every = self._outbox.epochs(is_final_too=True)
            self._short = {one.epoch.job_id for one in every if one.epoch.short}
        self._short |= set(jobs)

    @property
    def is_ledger_paused(self) -> bool:
        """Whether the ledger's guardian had paused it, by the block that was asked last."""
        return self._seen.is_ledger_paused

    def read(self, site: LedgerSite, at: Block) -> None:
        """Ask for every followed job and for a pause at once, unless this block was asked.

        Raises:
            RpcError: the chain cannot be asked.
        """
        if self._seen.block != at.hash:
            with self._lock:
                followed = sorted(self._followed)
            self._seen = _Seen(at.hash, *site.jobs(followed, at))
            self._note_endings(site, self._seen.jobs)

    def look(self, site: LedgerSite, at: Block) -> None:
        """Read every followed job again, as of the block that the journal was last brought up to.

        In a newer one an epoch may be closed that still counts as owed here.

        Raises:
            RpcError: the chain cannot be asked; older readings stay.
        """
        unfinished = self._outbox.epochs()
        wanted = self._wanted({record.epoch.job_id for record in unfinished}, at)
        self.read(site, at)
        if unread := sorted(wanted - self._seen.jobs.keys()):
            jobs = site.jobs(unread, at)[1]
            self._seen.jobs.update(jobs)
            self._note_endings(site, jobs)
        sealed = self._sealed(site) if wanted else {}
        for job_id in sorted(wanted):
            job = self._seen.jobs[job_id]
            if job is None:
                # Signed and not mined yet: the journal's account of it counts until then.
                continue
            of_job = [record for record in unfinished if record.epoch.job_id == job_id]
            score = self._recorded(site, of_job, at)
            is_over = job_id in self.over(at.time_s)
            if not is_over:
                score += sealed.get(job_id, 0) + self._outbox.waiting_score(job_id)
            reading = self._reading(site, job_id, job, score, at)
            with self._lock:
                self._readings[job_id] = self._with_ending(reading, job_id, job, at)
            is_at_rest = not score and not of_job
            if is_at_rest and (is_over or self._outbox.has_ended(job_id)):
                self._rest(job_id, at)

    def _wanted(self, unfinished: set[JobId], at: Block) -> set[JobId]:
        """Which jobs to look at: none that is over, unless it was closed short, and then rarely."""
        with self._lock:
            # A reorganisation that was too deep may have undone its end.
            for job_id in self._over.keys() & unfinished:
                del self._over[job_id]
                self._followed.add(job_id)
            looked_at = {job_id: abs(at.number - was) for job_id, was in self._over.items()}
            short = {
                job_id
                for job_id in self._short or ()
                if looked_at.get(job_id, self._rarely_blocks) >= self._rarely_blocks
            }
            return self._followed | short

    def _reading(
        self, site: LedgerSite, job_id: JobId, job: JobOnChain, score: int, at: Block
    ) -> EscrowReading:
        """A job's money at a block, by the score that no closed epoch has counted."""
        owed = job.unit_price * score // PRICED_SCORE
        with self._lock:
            advanced = self._advanced.get(job_id, Advanced())
        # Vouchers go ahead of what is owed at most; a round seldom costs more than that.
        is_tight = job.spendable < owed + max(owed, _ROUNDS * advanced.round_cost)
        if not is_tight and job_id not in (self._short or ()):
            return EscrowReading(job.spendable, owed, at.number)
        # Asked only where it can matter: it takes a call for every node.
        found = self._advances.read(site, job_id, job.unit_price, at, advanced.nodes)
        worths = self._advances.worths(job_id, job.unit_price) if found.is_ahead else {}
        self._tell(job_id, found, job.free)
        owed = found.owed(owed, worths)
        return EscrowReading(job.spendable, owed, at.number, found.coming, found.had)

    def _with_ending(
        self, reading: EscrowReading, job_id: JobId, job: JobOnChain, at: Block
    ) -> EscrowReading:
        """The reading with the job's announced end, if there is one."""
        ending = self._endings.get(job_id)
        if ending is None or not ending.is_over(at.time_s):
            self._unrecorded.pop(job_id, None)
            return reading._replace(ending=ending)
        said = ""
        if receipts := self._outbox.waiting_counts().get(job_id, 0):
            worth = job.unit_price * self._outbox.waiting_score(job_id) // PRICED_SCORE
            said = ending.unrecorded(receipts, worth)
        if said and said != self._unrecorded.get(job_id):
            log.warning("receipts came too late", reason=said)
            self._unrecorded[job_id] = said
        return reading._replace(ending=ending, is_over=True, unrecorded=said)

    def _note_endings(self, site: LedgerSite, jobs: Mapping[JobId, JobOnChain | None]) -> None:
        for job_id, job in jobs.items():
            ending = ending_of(job_id, job, site.window_s)
            if ending is not None:
                self._endings[job_id] = ending
            else:
                # A reorganisation may have undone it.
                self._endings.pop(job_id, None)
                self._unrecorded.pop(job_id, None)

    def _rest(self, job_id: JobId, at: Block) -> None:
        """Ask no more for a job of which everything is settled."""
        with self._lock:
            self._followed.discard(job_id)
            self._over[job_id] = at.number
        self._advances.forget(job_id)

    def _tell(self, job_id: JobId, found: Advances, free: int) -> None:
        said = shortfall(job_id, found.short, found.lacking, free)
        if said:
            self._shortfalls[job_id] = said
        else:
            self._shortfalls.pop(job_id, None)
            if found.is_over and self._short is not None:
                self._short.discard(job_id)

    def _recorded(self, site: LedgerSite, of_job: Sequence[EpochRecord], at: Block) -> int:
        """The score that the ledger has in epochs of a job whose pools are still in the escrow.

        What it has counted differs from what was sealed: it passes over receipts of a node that
        somebody else has recorded. Nor does it matter to it who closes an epoch.
        """
        epochs = [record.epoch for record in of_job if record.epoch.state not in _CLOSED]
        if not epochs:
            return 0
        numbers = [epoch.number for epoch in epochs]
        on_chain = site.epochs(epochs[0].job_id, numbers, at)
        return sum(epoch.total_score for epoch in on_chain if not epoch.closed_at_s)

    def _sealed(self, site: LedgerSite) -> dict[JobId, int]:
        """The score of batches that took no effect so far, by job."""
        nonces: dict[JobId, set[int]] = {}
        for row in self._outbox.transactions(site.account, states=_WITHOUT_EFFECT):
            job_id = row.transaction.job_id
            if job_id is not None and row.transaction.part == Part.BATCH.value:
                nonces.setdefault(job_id, set()).add(row.transaction.nonce)
        return {
            job_id: sum(
                span.score
                for batch in self._outbox.batches(job_id, since=min(of_job))
                if batch.account == site.account and batch.nonce in of_job
                for span in batch.spans
            )
            for job_id, of_job in nonces.items()
        }

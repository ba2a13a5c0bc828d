"""Whether a job's escrow covers work before it is done, so that nobody works unpaid."""

import threading
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from coordinator.core.settlement.epoch import EpochState, Part
from coordinator.core.settlement.sending import TransactionState
from coordinator.core.settlement.shortfall import shortfall
from coordinator.shell.chain.reading.advances import AdvanceReader, Advances
from coordinator.shell.chain.site import LedgerSite
from coordinator.shell.journal.ledger.interface import Outbox
from coordinator.shell.journal.ledger.records import EpochRecord
from hypergpu.chain.ledger import JobOnChain
from hypergpu.chain.rpc.answers import Block
from hypergpu.ids import JobId, NodeId
from hypergpu.ledger.pay import PRICED_SCORE

_CLOSED = frozenset({EpochState.CONFIRMED, EpochState.PAID, EpochState.FINAL})
_ROUNDS = 2
"""The next, and one that vouchers were an advance on."""
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

    @property
    def left(self) -> int:
        """What new work may cost."""
        return max(0, self.free + self.coming - self.owed)


class _Seen(NamedTuple):
    """What one block says, by its hash."""

    block: bytes
    is_paused: bool
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
        self._costs: dict[JobId, int] = {}
        """The most that was asked for of late."""
        self._over: dict[JobId, int] = {}
        """Jobs that have ended and are settled, by the height at which they were looked at last."""
        self._seen = _Seen(b"", False, {})
        self._short: set[JobId] | None = None
        """Jobs with epochs that were closed short; None: not looked up since the start."""
        self._shortfalls: dict[JobId, str] = {}

    def follow(self, job_id: JobId) -> None:
        """Read this job's escrow from now on."""
        with self._lock:
            self._followed.add(job_id)
            self._over.pop(job_id, None)

    def reading(self, job_id: JobId) -> EscrowReading | None:
        """What is known of a job's escrow; None: the chain was not reached since the start."""
        with self._lock:
            return self._readings.get(job_id)

    def shortage(self, job_id: JobId, cost: int) -> str:
        """Why work of this cost must not be given out; empty: it may.

        What is not known stops nothing: the journal's own account of the job's escrow does, and
        training does not wait for a chain.
        """
        with self._lock:
            reading = self._readings.get(job_id)
            self._costs[job_id] = cost
        if reading is None or reading.left >= cost:
            return ""
        coming = f", {reading.coming} coming back" if reading.coming else ""
        return (
            f"the escrow of {job_id} has {reading.left} left on the ledger (block "
            f"{reading.height}: {reading.free} free, {reading.owed} owed{coming}),"
            f" {cost - reading.left} less than the next work may cost"
        )

    @property
    def shortfalls(self) -> tuple[str, ...]:
        """What is to be said of epochs that were closed short, by the newest look."""
        return tuple(self._shortfalls.values())

    def watch(self, jobs: Iterable[JobId]) -> None:
        """Tell of these jobs, whose epochs were closed short, until nothing of it is lacking."""
        if self._short is None:
            every = self._outbox.epochs(is_final_too=True)
            self._short = {one.epoch.job_id for one in every if one.epoch.short}
        self._short |= set(jobs)

    @property
    def is_paused(self) -> bool:
        """Whether the ledger's guardian had paused it, by the block that was asked last."""
        return self._seen.is_paused

    def read(self, site: LedgerSite, at: Block) -> None:
        """Ask for every followed job and for a pause at once, unless this block was asked.

        Raises:
            RpcError: the chain cannot be asked.
        """
        if self._seen.block != at.hash:
            with self._lock:
                followed = sorted(self._followed)
            self._seen = _Seen(at.hash, *site.jobs(followed, at))

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
            self._seen.jobs.update(site.jobs(unread, at)[1])
        sealed = self._sealed(site) if wanted else {}
        for job_id in sorted(wanted):
            job = self._seen.jobs[job_id]
            if job is None:
                # Signed and not mined yet: the journal's account of it counts until then.
                continue
            of_job = [record for record in unfinished if record.epoch.job_id == job_id]
            score = self._recorded(site, of_job, at) + sealed.get(job_id, 0)
            score += self._outbox.waiting_score(job_id)
            reading = self._reading(site, job_id, job, score, at)
            with self._lock:
                self._readings[job_id] = reading
            if not score and not of_job and self._has_ended(job_id):
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
            # Vouchers go ahead of what is owed at most; a round seldom costs more than that.
            is_tight = job.spendable < owed + max(owed, _ROUNDS * self._costs.get(job_id, 0))
        if not is_tight and job_id not in (self._short or ()):
            return EscrowReading(job.spendable, owed, at.number)
        # Asked only where it can matter: it takes a call for every node.
        found = self._advances.read(site, job_id, job.unit_price, at)
        worths = self._advances.worths(job_id, job.unit_price) if found.is_ahead else {}
        self._tell(job_id, found, job.free)
        owed = found.owed(owed, worths)
        return EscrowReading(job.spendable, owed, at.number, found.coming, found.had)

    def _has_ended(self, job_id: JobId) -> bool:
        every = self._outbox.epochs(is_final_too=True)
        return any(record.is_last for record in every if record.epoch.job_id == job_id)

    def _rest(self, job_id: JobId, at: Block) -> None:
        """Ask no more for a job of which everything is settled."""
        with self._lock:
            self._followed.discard(job_id)
            self._costs.pop(job_id, None)
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

"""Whether a job's escrow covers work before it is done, so that nobody works unpaid."""

import threading
from collections.abc import Iterable
from typing import NamedTuple

from coordinator.core.settlement.epoch import EpochState, Part
from coordinator.core.settlement.sending import TransactionState
from coordinator.core.settlement.shortfall import shortfall
from coordinator.shell.chain.reading.advances import Advances, advances
from coordinator.shell.chain.site import LedgerSite
from coordinator.shell.journal.ledger.interface import Outbox
from hypergpu.chain.rpc.answers import Block
from hypergpu.ids import JobId, NodeId
from hypergpu.ledger.pay import PRICED_SCORE

_CLOSED = frozenset({EpochState.CONFIRMED, EpochState.PAID, EpochState.FINAL})
_WITHOUT_EFFECT = [TransactionState.WAITING, TransactionState.FAILED]


class EscrowReading(NamedTuple):
    """A job's money, in the token's smallest units, as of one block."""

    free: int
    """On the ledger, reserved by nothing."""
    owed: int
    """Of it, what kept receipts earn that no closed epoch has counted yet, and what short epochs
    left, less what redeemed vouchers have paid of both: that has left the escrow already."""
    height: int

    @property
    def left(self) -> int:
        """What new work may cost."""
        return max(0, self.free - self.owed)


class EscrowBook:
    """The newest reading of each job that pays. Asked by any thread, kept by the pipeline's."""

    def __init__(self, outbox: Outbox) -> None:
        self._outbox = outbox
        self._lock = threading.Lock()
        self._followed: set[JobId] = set()
        self._readings: dict[JobId, EscrowReading] = {}
        self._costs: dict[JobId, int] = {}
        """The most that was asked for of late."""
        self._short: set[JobId] | None = None
        """Jobs with epochs that were closed short; None: not looked up since the start."""
        self._shortfalls: dict[JobId, str] = {}

    def follow(self, job_id: JobId) -> None:
        """Read this job's escrow from now on."""
        with self._lock:
            self._followed.add(job_id)

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
        return (
            f"the escrow of {job_id} has {reading.left} left on the ledger (block "
            f"{reading.height}: {reading.free} free, {reading.owed} owed), {cost - reading.left} "
            "less than the next work may cost"
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

    def look(self, site: LedgerSite, at: Block) -> None:
        """Read every followed job again, as of the block that the journal was last brought up to.

        In a newer one an epoch may be closed that still counts as owed here.

        Raises:
            RpcError: the chain cannot be asked; older readings stay.
        """
        with self._lock:
            followed = set(self._followed)
        short = self._short or set()
        sealed = self._sealed(site) if followed else {}
        for job_id in sorted(followed | short):
            job = site.job(job_id, at)
            if job is None:
                # Signed and not mined yet: the journal's account of it counts until then.
                continue
            score = self._recorded(site, job_id, at) + sealed.get(job_id, 0)
            score += self._outbox.waiting_score(job_id)
            owed = job.unit_price * score // PRICED_SCORE
            with self._lock:
                # Vouchers go ahead of what is owed at most; a round seldom costs more than that.
                is_tight = job.spendable < owed + max(owed, self._costs.get(job_id, 0))
            if is_tight or job_id in short:
                # Asked only where it can matter: it takes a call for every node.
                found = advances(site, self._outbox, job_id, job.unit_price, at)
                owed = found.owed(owed, self._worths(job_id, job.unit_price))
                self._tell(job_id, found, job.free)
            with self._lock:
                self._readings[job_id] = EscrowReading(job.spendable, owed, at.number)

    def _tell(self, job_id: JobId, found: Advances, free: int) -> None:
        said = shortfall(job_id, found.short, found.lacking, free)
        if said:
            self._shortfalls[job_id] = said
        else:
            self._shortfalls.pop(job_id, None)
            if found.is_over and self._short is not None:
                self._short.discard(job_id)

    def _worths(self, job_id: JobId, unit_price: int) -> dict[NodeId, int]:
        scores = self._outbox.node_scores(job_id)
        return {node: unit_price * score // PRICED_SCORE for node, score in scores.items()}

    def _recorded(self, site: LedgerSite, job_id: JobId, at: Block) -> int:
        """The score that the ledger has in epochs whose pools are still in the escrow.

        What it has counted differs from what was sealed: it passes over receipts of a node that
        somebody else has recorded. Nor does it matter to it who closes an epoch.
        """
        numbers = [
            record.epoch.number
            for record in self._outbox.epochs()
            if record.epoch.job_id == job_id and record.epoch.state not in _CLOSED
        ]
        on_chain = site.epochs(job_id, numbers, at)
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

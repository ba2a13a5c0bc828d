"""What every journal offers to the pipeline. Calls block until durable, as the journal's own do.

Receipts come in with the rows of the job that earned them (`JobJournal.append`). A removed job's
receipts and transactions stay: what was earned is owed.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Protocol

from coordinator.core.settlement.sending import TransactionState
from coordinator.shell.journal.ledger.records import (
    AccountName,
    BatchRecord,
    EpochRecord,
    OutboxChange,
    OutboxRow,
    ReceiptRecord,
    UnsealedReceipt,
)
from hypergpu.ids import JobId, NodeId


class ReceiptBook(Protocol):
    """Receipts, by job and node."""

    def receipt_counts(self, job_id: JobId) -> Mapping[NodeId, int]:
        """How many receipts each node has in a job, which is the sequence of its next."""

    def receipts(
        self, job_id: JobId, *, node: NodeId | None = None, epoch: int | None = None
    ) -> tuple[ReceiptRecord, ...]:
        """Receipts of a job, by node and sequence: all, a node's, an epoch's."""

    def receipt(self, job_id: JobId, node: NodeId, sequence: int) -> ReceiptRecord | None:
        """One receipt."""


class Outbox(Protocol):
    """Receipts on their way into blocks. One pipeline at a time writes it."""

    def sealed_counts(self, job_id: JobId) -> Mapping[NodeId, int]:
        """How many receipts of each node are in batches, or known to be on the chain."""

    def waiting_counts(self) -> Mapping[JobId, int]:
        """How many receipts are in no batch, by job; none where none. Cost grows with the nodes."""

    def unsealed(
        self, limit: int, *, without: Collection[JobId] = ()
    ) -> tuple[UnsealedReceipt, ...]:
        """Receipts in no batch, by job, node and sequence; none of the jobs named.

        Cost grows with them, not with all.
        """

    def epochs(self, *, is_final_too: bool = False) -> tuple[EpochRecord, ...]:
        """Epochs on their way, by job and number: not final, or not left by their job yet.

        Those that are final too when asked for.
        """

    def has_ended(self, job_id: JobId) -> bool:
        """Whether the job has left its last epoch. Cheap: reads none of what its epochs hold."""

    def transactions(
        self, account: AccountName, *, states: Sequence[TransactionState], limit: int = 0
    ) -> tuple[OutboxRow, ...]:
        """Transactions in the given states, by nonce; at most ``limit`` unless it is 0."""

    def newest_final(self, account: AccountName, count: int) -> tuple[OutboxRow, ...]:
        """The final transactions of the highest nonces, newest first."""

    def transaction_for(self, account: AccountName, purpose: str) -> OutboxRow | None:
        """The transaction that was sealed for a purpose."""

    def purposes(self, account: AccountName, prefix: str) -> tuple[str, ...]:
        """What the account's transactions are for, as far as it begins with ``prefix``."""

    def next_nonce(self, account: AccountName) -> int | None:
        """The nonce behind the account's last transaction; None before its first."""

    def next_batch(self, account: AccountName, job_id: JobId) -> int:
        """The number of a job's next batch on the contract, from 0."""

    def batches(self, job_id: JobId, *, since: int = 0) -> tuple[BatchRecord, ...]:
        """What was recorded of a job, in order of nonces, from nonce ``since`` on."""

    def waiting_score(self, job_id: JobId) -> int:
        """What a job's receipts in no batch weigh together: the sum of samples times quality."""

    def node_scores(self, job_id: JobId) -> Mapping[NodeId, int]:
        """What all receipts of each node of a job weigh together. Cost grows with them."""

    def write(self, change: OutboxChange) -> None:
        """Write all of a change, or nothing.

        Raises:
            JournalConflictError: a nonce does not follow on, a purpose is taken, or receipts are
                sealed that are in a batch already.
        """

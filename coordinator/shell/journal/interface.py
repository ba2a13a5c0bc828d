"""What every journal offers. Calls block until durable: call them from a thread, in any number.

``append`` either writes everything or nothing. A full disk raises `HyperGPUError` (DISK_FULL) and
leaves the journal as it was. Any other error leaves it open whether the last call took effect: stop
and start again, a replay finds out.
"""

from collections.abc import Mapping, Sequence
from typing import Protocol

from coordinator.shell.journal.records import (
    CertificateRecord,
    Entry,
    Head,
    NodeRecord,
    Reading,
    RequestClaim,
    SnapshotReading,
    TokenRecord,
    UpdateCount,
)
from hypergpu.ids import JobId, NodeId, TokenId


class JobJournal(Protocol):
    """Each job's events as a hash chain, with snapshots."""

    def append(self, entries: Sequence[Entry], claims: Sequence[RequestClaim] = ()) -> None:
        """Write entries of one or several jobs in one transaction. A new job starts at sequence 0.

        Args:
            entries: Of each job in order.
            claims: Request ids that are taken from now on.

        Raises:
            JournalConflictError: an entry does not follow on its job's last, or a request id is
                taken.
        """

    def read(
        self, job_id: JobId, from_sequence: int = 0, *, limit: int = 0, after: Head | None = None
    ) -> Reading:
        """Rows from ``from_sequence`` on, each checked against the chain. An unknown job has none.

        Args:
            job_id: Whose.
            from_sequence: The first wanted.
            limit: At most so many; 0 is all.
            after: What the first wanted row must follow on; None takes the stored row before it.
        """

    def head(self, job_id: JobId) -> Head | None:
        """Where the next entry goes on; None for an unknown job."""

    def jobs(self) -> tuple[JobId, ...]:
        """Every job, in order of creation."""

    def cut_back(self, job_id: JobId, head: Head) -> None:
        """Forget every row and snapshot behind ``head``, which becomes the job's end."""

    def remove_job(self, job_id: JobId) -> None:
        """Forget the job wholly, its request ids too."""

    def request(self, request_id: str) -> RequestClaim | None:
        """Who took a request id."""

    def save_snapshot(self, job_id: JobId, sequence: int, state_json: bytes) -> None:
        """Keep the state after event ``sequence``; the two newest snapshots of a job are kept.

        Raises:
            JournalConflictError: the job has no such row.
        """

    def snapshot(self, job_id: JobId) -> SnapshotReading:
        """The newest snapshot whose bytes hold and which is not behind the job's end."""


class Registry(Protocol):
    """Who may speak: nodes, their nonces and certificates, and tokens."""

    def advance_nonce(self, node: NodeId, nonce: int) -> bool:
        """Raise the node's high-water mark to ``nonce``, durably; False when it is not above it."""

    def nonce(self, node: NodeId) -> int:
        """The node's high-water mark; 0 before its first."""

    def record_node(self, record: NodeRecord) -> None:
        """Add a node, or renew its key, capabilities, software and last sight.

        First sight, revocation and counters of a known node stay as they are.
        """

    def record_activity(
        self, last_seen_ms: Mapping[NodeId, int], updates: Mapping[NodeId, UpdateCount]
    ) -> None:
        """Store when nodes were last heard of and add to their counters, all or nothing.

        Unknown nodes are passed over.
        """

    def set_revoked(self, node: NodeId, *, is_revoked: bool) -> bool:
        """Revoke or re-admit a node; False when it is unknown."""

    def node(self, node: NodeId) -> NodeRecord | None:
        """One node."""

    def nodes(self) -> tuple[NodeRecord, ...]:
        """Every node, by first sight."""

    def add_token(self, record: TokenRecord) -> None:
        """Keep a new token."""

    def token(self, token_id: TokenId) -> TokenRecord | None:
        """One token."""

    def tokens(self) -> tuple[TokenRecord, ...]:
        """Every token, by creation."""

    def revoke_token(self, token_id: TokenId) -> bool:
        """Void a token for good; False when it is unknown."""

    def spend_token(self, token_id: TokenId, node: NodeId, now_s: int) -> bool:
        """Take one use for ``node``, atomically.

        A node that joined with the token before takes none, and passes unless the token is revoked.
        False when the token is unknown, revoked, expired or used up.
        """

    def has_joined(self, token_id: TokenId, node: NodeId) -> bool:
        """Whether the node took a use of the token."""

    def record_certificate(self, record: CertificateRecord) -> None:
        """Remember a certificate that is about to be handed out."""

    def certificates(self, node: NodeId) -> tuple[CertificateRecord, ...]:
        """A node's certificates, oldest first."""


class Journal(JobJournal, Registry, Protocol):
    """Both in one place, so that one transaction log holds all that must survive."""

    def close(self) -> None:
        """Let go of files, connections and the lock."""

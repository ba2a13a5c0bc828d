"""Plain data that the journal takes and gives, and the errors it raises."""

from typing import NamedTuple

import msgspec

from hypergpu.ids import Digest, JobId, NodeId, TokenId
from hypergpu.wire.token import Role


class UpdateCount(NamedTuple):
    """How many updates of one node were taken in."""

    accepted: int = 0
    refused: int = 0


class Entry(msgspec.Struct, frozen=True):
    """One event of one job. ``sequence`` counts from 0 with no gap."""

    job_id: JobId
    sequence: int
    at_ms: int
    """Job time."""
    kind: str
    body_json: bytes


class Head(msgspec.Struct, frozen=True):
    """Where a job's chain ends. Sequence -1 is the empty chain."""

    sequence: int
    chain: bytes


class Damage(msgspec.Struct, frozen=True):
    """The first place where a job's journal is not what was written."""

    job_id: JobId
    sequence: int
    """The first row, or snapshot, that cannot be believed."""
    last_good: Head
    reason: str
    """What is wrong, where, and what becomes of it; for people."""


class Reading(msgspec.Struct, frozen=True):
    """Rows that hold, in order, and what is wrong behind them."""

    entries: tuple[Entry, ...]
    head: Head
    """Of the last row in ``entries``, or of the row before the first wanted."""
    damage: Damage | None = None


class Snapshot(msgspec.Struct, frozen=True):
    """A job's state after the event ``head.sequence``."""

    job_id: JobId
    head: Head
    state_json: bytes


class SnapshotReading(msgspec.Struct, frozen=True):
    """The newest snapshot that holds, and the newer ones that do not."""

    snapshot: Snapshot | None
    damages: tuple[Damage, ...] = ()


class RequestClaim(msgspec.Struct, frozen=True):
    """A caller's request id is taken by a job.

    The same id with another fingerprint is another request, and a conflict.
    """

    request_id: str
    job_id: JobId
    fingerprint: Digest
    """Of what was asked for."""


class NodeRecord(msgspec.Struct, frozen=True):
    """A node that has joined at least once. Times are Unix milliseconds."""

    node: NodeId
    public_key: bytes
    capabilities_json: bytes
    software: str
    first_seen_ms: int
    last_seen_ms: int
    is_revoked: bool = False
    updates_accepted: int = 0
    updates_refused: int = 0


class TokenRecord(msgspec.Struct, frozen=True):
    """A token as the coordinator keeps it: without its secret."""

    token_id: TokenId
    role: Role
    label: str
    secret_hash: bytes
    """BLAKE3, keyed with the token's id."""
    created_s: int
    expires_s: int
    """Unix seconds; 0 never expires."""
    uses_left: int | None
    """None: unlimited."""
    is_revoked: bool = False


class CertificateRecord(msgspec.Struct, frozen=True):
    """A certificate that was issued to a node."""

    serial: str
    node: NodeId
    issued_s: int
    expires_s: int


class JournalError(Exception):
    """The journal cannot do what it is for. The text says what, where and the fix."""


class JournalLockedError(JournalError):
    """Another coordinator has this journal open."""


class JournalTooNewError(JournalError):
    """A newer hypergpu wrote this journal."""


class JournalTooOldError(JournalError):
    """An older hypergpu wrote this journal, in a form that is no longer read."""


class JournalUnreadableError(JournalError):
    """The database as a whole cannot be read."""


class JournalConflictError(JournalError):
    """An append that does not follow on, or a request id that is taken. Nothing was written."""

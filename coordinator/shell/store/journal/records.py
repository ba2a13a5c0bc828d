"""Plain data that the journal takes and gives, and the errors it raises."""

from typing import NamedTuple

import msgspec

from hypergpu.errors import HyperGPUError, Reason
from hypergpu.ids import Digest, JobId, NodeId, TokenId
from hypergpu.wire.credentials import Role


class UpdateCount(NamedTuple):
    """Counts of one node's accepted and rejected updates."""

    accepted: int = 0
    rejected: int = 0


class Entry(msgspec.Struct, frozen=True):
    """One event of one job. ``sequence`` counts from 0 with no gap."""

    job_id: JobId
    sequence: int
    at_ms: int
    """Job time."""
    kind: str
    body_json: bytes


class Head(msgspec.Struct, frozen=True):
    """Place in a job's chain. Sequence -1 is the empty chain."""

    sequence: int
    chain: bytes


class Reading(msgspec.Struct, frozen=True):
    """Rows that hold, in order, and the damage behind them."""

    entries: tuple[Entry, ...]
    head: Head
    """Place of the last row in ``entries``, or of the row before the first wanted."""
    damage: str = ""
    """Description for people of the first row that cannot be believed; empty when all hold."""


class Snapshot(msgspec.Struct, frozen=True):
    """A job's state after the event ``head.sequence``."""

    job_id: JobId
    head: Head
    state_json: bytes


class Recovery(msgspec.Struct, frozen=True):
    """A job as the journal knows it: replay ``entries`` onto ``snapshot``."""

    snapshot: Snapshot | None
    """None: replay from the first event."""
    entries: tuple[Entry, ...]
    """Rows behind the snapshot. Without a snapshot and without entries nothing of the job is left.
    """
    damages: tuple[str, ...] = ()
    """Descriptions for people of damage that was found and cut off."""


class RequestClaim(msgspec.Struct, frozen=True):
    """A caller's request id is taken by a job.

    The same id with another fingerprint is another request, and a conflict.
    """

    request_id: str
    job_id: JobId
    fingerprint: Digest
    """Digest of the request."""


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
    updates_rejected: int = 0


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


class SpecKeyRecord(msgspec.Struct, frozen=True):
    """A user's key, as it was registered."""

    public_key: bytes
    """ed25519, 32 bytes."""
    token_id: TokenId
    label: str
    registered_ms: int
    state: str = ""
    """``good``, ``replaced`` or ``revoked``."""


class JournalError(Exception):
    """The journal cannot do its work. The text says why, where, and the fix."""


class JournalLockedError(JournalError):
    """Another coordinator has this journal open."""


class TenureLostError(HyperGPUError):
    """Another coordinator drives the jobs, or may: this one writes, signs and answers no more."""

    def __init__(self, why: str) -> None:
        fix = "dial the coordinator that drives now; this one ends, or waits for its turn"
        detail = f"this coordinator drives no more: {why}"
        super().__init__(Reason.NOT_READY, detail, fix=fix)


class JournalVersionError(JournalError):
    """Another version of hypergpu wrote this journal."""


class JournalUnreadableError(JournalError):
    """The database as a whole cannot be read."""


class JournalConflictError(JournalError):
    """An append that does not follow on, or a request id that is taken. Nothing was written."""

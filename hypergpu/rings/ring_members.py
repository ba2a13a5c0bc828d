"""Who is in a ring, each with a key that its node's identity has signed. Pure.

A member's key is an X25519 key that its node made for one lease. The identity signs it, so that
only whoever holds a node's identity can be that node in a ring; who the nodes are, the coordinator
says. What the identity signs, integers big-endian and unsigned, under Keccak-256::

    u8 length | domain, ASCII: "hypergpu/v1/ring-key"
    u32 length | job id, UTF-8  |  u64 lease  |  key[32]
"""

from collections.abc import Sequence

import msgspec
from blake3 import blake3

from hypergpu.crypto import IdentityKey, keccak, signer_of
from hypergpu.ids import JobId, NodeId
from hypergpu.rings.layer_span import LayerSpan, gaps
from hypergpu.rings.stage_work import STAGES_MOST

KEY_BYTES = 32
_KEY_DOMAIN = b"hypergpu/v1/ring-key"
_RING_DOMAIN = b"hypergpu/v1/ring"
_CHECK_DOMAIN = b"hypergpu/v1/ring-check"
_LEASE_MOST = 1 << 64


class RingMember(msgspec.Struct, frozen=True, array_like=True):
    """A node of a ring, as the others are told of it."""

    node: NodeId
    lease: int
    span: LayerSpan
    key: bytes
    """Its public key, 32 bytes."""
    signature: bytes
    """The node's, over job, lease and key."""


def _key_digest(job_id: JobId, lease: int, key: bytes) -> bytes:
    job = job_id.encode()
    lengths = len(_KEY_DOMAIN).to_bytes(1, "big"), len(job).to_bytes(4, "big")
    return keccak(lengths[0] + _KEY_DOMAIN + lengths[1] + job + lease.to_bytes(8, "big") + key)


def sign_ring_key(identity: IdentityKey, job_id: JobId, lease: int, key: bytes) -> bytes:
    """A node's signature over its key for a lease: 65 bytes."""
    return identity.sign_digest(_key_digest(job_id, lease, key))


def key_fault(job_id: JobId, member: RingMember) -> str:
    """Why a member's key is not its node's; empty: it is. About 0.1 ms."""
    if len(member.key) != KEY_BYTES:
        return f"{member.node} has a key of {len(member.key)} bytes for the ring, not {KEY_BYTES}"
    is_lease = 0 <= member.lease < _LEASE_MOST
    digest = _key_digest(job_id, member.lease, member.key) if is_lease else b""
    if not is_lease or signer_of(digest, member.signature) != member.node:
        return f"{member.node} has not signed the key that is told to be its own"
    return ""


def members_fault(job_id: JobId, layers: int, members: Sequence[RingMember]) -> str:
    """Why these are not the members of a ring in its order; empty: they are.

    Args:
        job_id: The served model's.
        layers: Of the whole model.
        members: In the order of the ring.
    """
    spans = tuple(member.span for member in members)
    is_ordered = list(spans) == sorted(spans) and all(span.count > 0 for span in spans)
    if not 0 < len(members) <= STAGES_MOST or not is_ordered:
        return f"a ring has 1 to {STAGES_MOST} stages, in the order of their layers"
    if gaps(spans, layers) or sum(span.count for span in spans) != layers:
        return "the members of a ring do not hold every layer once"
    if len({member.node for member in members}) != len(members):
        return "a node is in the ring twice"
    return next(filter(None, (key_fault(job_id, member) for member in members)), "")


def ring_digest(job_id: JobId, epoch: int, members: Sequence[RingMember]) -> bytes:
    """The 32 bytes that name a ring: stages that were told other members have another name."""
    content = msgspec.msgpack.encode((job_id, epoch, tuple(members)))
    return blake3(_RING_DOMAIN + content).digest()


def check_digest(job_id: JobId, check: int, sender: RingMember, checker: RingMember) -> bytes:
    """The 32 bytes that name what a stage hands a checker."""
    content = msgspec.msgpack.encode((job_id, check, sender, checker))
    return blake3(_CHECK_DOMAIN + content).digest()

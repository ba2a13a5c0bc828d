"""A node's signed statement: "I made this update of this shard from this model"."""

import struct
from collections.abc import Iterable
from functools import lru_cache
from struct import Struct

import msgspec

from hypergpu.digest import digest_of
from hypergpu.ids import Digest, JobKey, NodeId
from hypergpu.keys.keccak import keccak
from hypergpu.keys.signature import signer_of
from hypergpu.statements.domain import address_bytes, word_bytes
from hypergpu.statements.signing import signed_digest, struct_hash
from hypergpu.units import Bytes, Milliseconds, Samples

_TYPE = keccak(
    b"Contribution(bytes32 job,uint32 epoch,uint32 round,address node,bytes32 shard,bytes32 model,"
    b"bytes32 update,uint64 samples,uint32 innerSteps,uint64 computeMs,uint64 updateBytes,"
    b"uint64 lease,uint64 nonce)"
)
_WORDS = Struct(">32s32s28xI28xI12x20s32s32s32s24xQ28xI24xQ24xQ24xQ24xQ")
_SHARD = Struct(">II")
_RANGE = Struct(">QQ")


class Contribution(msgspec.Struct, frozen=True, kw_only=True):
    """An update that a node made under a lease, signed by the node when it submits it.

    The upload's offsets and stripes are not part of it: digest and size are, and the bytes are
    checked against both once they are complete.
    """

    job: JobKey
    epoch: int
    round: int
    node: NodeId
    shard: Digest
    """Digest of the positions trained on: see `shard_digest`."""
    model: Digest
    """Digest of the parameters that the training started from."""
    update: Digest
    samples: Samples
    """Samples assigned."""
    inner_steps: int
    """Inner steps taken."""
    compute_ms: Milliseconds
    """The node's own measurement; pay does not depend on it."""
    update_bytes: Bytes
    lease: int
    nonce: int

    def encode_data(self) -> bytes:
        """See `Statement.encode_data`."""
        return _WORDS.pack(
            _TYPE,
            word_bytes(self.job),
            self.epoch,
            self.round,
            address_bytes(self.node),
            word_bytes(self.shard),
            word_bytes(self.model),
            word_bytes(self.update),
            self.samples,
            self.inner_steps,
            self.compute_ms,
            self.update_bytes,
            self.lease,
            self.nonce,
        )


@lru_cache(16_384)
def contribution_hash(contribution: Contribution) -> bytes:
    """`struct_hash` of a contribution, remembered for the receipt that its round brings later.

    Raises:
        ValueError: As `struct_hash`.
    """
    return struct_hash(contribution)


def is_signed_by(
    node: NodeId, separator: bytes, contribution: Contribution, signature: bytes
) -> bool:
    """Whether ``node`` is the contribution's node and signed it.

    Safe for content from outside: it never raises.
    """
    try:
        digest = signed_digest(separator, contribution_hash(contribution))
    except ValueError:
        return False
    return contribution.node == node and signer_of(digest, signature) == node


def shard_digest(partition: int, ranges: Iterable[tuple[int, Samples]]) -> Digest:
    """Name of the data that a participant trains on in a round.

    The canonical bytes are ``u32 partition | u32 count of ranges | (u64 start | u64 count)...``,
    big-endian. The job determines the samples at these positions.

    Args:
        partition: Partition of the job's data.
        ranges: Start and count, in the order in which they are trained on.

    Raises:
        ValueError: A number does not fit its field.
    """
    try:
        packed = [_RANGE.pack(start, count) for start, count in ranges]
        return digest_of(b"".join((_SHARD.pack(partition, len(packed)), *packed)))
    except struct.error as broken:
        raise ValueError(f"a number does not fit its field: {broken}") from broken

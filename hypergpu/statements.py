"""Contributions of nodes and receipts for them: the typed data (EIP-712) that is signed about work.

Pure: anybody can check a receipt without a chain. `hypergpu.wire.messages` translates them.
"""

import struct
from collections.abc import Iterable
from functools import lru_cache
from struct import Struct

import msgspec

from hypergpu.crypto import keccak, signed_digest, signer, signer_of, struct_hash
from hypergpu.digests import digest_of
from hypergpu.ids import Address, Digest, JobKey, Keccak, NodeId
from hypergpu.ledger_terms import Domain, address_bytes, separator_of, word_bytes
from hypergpu.units import BasisPoints, Bytes, Milliseconds, Samples

_CONTRIBUTION_TYPE = keccak(
    b"Contribution(bytes32 job,uint32 epoch,uint32 round,address node,bytes32 shard,bytes32 model,"
    b"bytes32 update,uint64 samples,uint32 innerSteps,uint64 computeMs,uint64 updateBytes,"
    b"uint64 lease,uint64 nonce)"
)
_CONTRIBUTION_WORDS = Struct(">32s32s28xI28xI12x20s32s32s32s24xQ28xI24xQ24xQ24xQ24xQ")
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
        return _CONTRIBUTION_WORDS.pack(
            _CONTRIBUTION_TYPE,
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


class SignedContribution(msgspec.Struct, frozen=True):
    """A contribution that its node signed."""

    contribution: Contribution
    signature: bytes


@lru_cache(2_048)
def contribution_hash(contribution: Contribution) -> bytes:
    """`struct_hash` of a contribution, remembered for the receipt that its round brings later.

    Two rounds of a thousand nodes, a kilobyte each: that much a coordinator grows after its start.

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
        packed_ranges = [_RANGE.pack(start, count) for start, count in ranges]
        return digest_of(b"".join((_SHARD.pack(partition, len(packed_ranges)), *packed_ranges)))
    except struct.error as error:
        raise ValueError(f"a number does not fit its field: {error}") from error


WHOLE_BPS = BasisPoints(10_000)
RECEIPTS_MOST = 2**32 - 1
"""Receipts of one node in one job that a ledger can count."""

_RECEIPT_TYPE = keccak(
    b"Receipt(bytes32 job,uint32 epoch,uint32 round,address node,uint64 sequence,"
    b"bytes32 contribution,uint64 samples,uint16 qualityBps,bytes32 evaluator,uint64 totalScore)"
)
_RECEIPT_WORDS = Struct(">32s32s28xI28xI12x20s24xQ32s24xQ30xH32s24xQ")
_SHARED = ("job", "epoch", "round", "node")


class Receipt(msgspec.Struct, frozen=True, kw_only=True):
    """An accepted contribution, signed by the coordinator once the round's quality is known."""

    job: JobKey
    epoch: int
    round: int
    node: NodeId
    sequence: int
    """Dense for each node in a job, from 0."""
    contribution: Keccak
    """`struct_hash` of the contribution."""
    samples: Samples
    """Samples assigned and checked."""
    quality_bps: BasisPoints
    evaluator: Keccak
    """Keccak-256 of a short name of the measurement."""
    total_score: int
    """Sum of samples x quality_bps over the node's receipts in the job, this one included."""

    @property
    def score(self) -> int:
        """This receipt's part of ``total_score``."""
        return self.samples * self.quality_bps

    def encode_data(self) -> bytes:
        """See `Statement.encode_data`."""
        return _RECEIPT_WORDS.pack(
            _RECEIPT_TYPE,
            word_bytes(self.job),
            self.epoch,
            self.round,
            address_bytes(self.node),
            self.sequence,
            word_bytes(self.contribution),
            self.samples,
            self.quality_bps,
            word_bytes(self.evaluator),
            self.total_score,
        )


class SignedReceipt(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A receipt with its contribution and both signatures."""

    receipt: Receipt
    signature: bytes
    """The coordinator's signature of the receipt."""
    contribution: Contribution
    contribution_signature: bytes
    """The node's signature of the contribution."""


def receipt_fault(signed: SignedReceipt, domain: Domain, coordinator: Address) -> str:
    """Reason why a ledger would not take a signed receipt; empty if it is sound.

    Safe for content from outside: it never raises. About 0.2 ms, two signatures.
    """
    receipt, contribution = signed.receipt, signed.contribution
    try:
        contribution_digest = contribution_hash(contribution).hex()
    except ValueError as error:
        return f"its contribution cannot be encoded: {error}"
    if receipt.contribution != contribution_digest:
        return "it is for another contribution"
    if any(getattr(receipt, name) != getattr(contribution, name) for name in _SHARED):
        return "its job, epoch, round or node differs from its contribution's"
    if fault := _figure_fault(receipt, contribution):
        return fault
    separator = separator_of(domain)
    if signer(separator, receipt, signed.signature) != coordinator:
        return f"the coordinator {coordinator} did not sign it"
    if signer(separator, contribution, signed.contribution_signature) != receipt.node:
        return f"the node {receipt.node} did not sign its contribution"
    return ""


def _figure_fault(receipt: Receipt, contribution: Contribution) -> str:
    if receipt.samples > contribution.samples:
        return f"{receipt.samples} samples were checked, {contribution.samples} assigned"
    if receipt.quality_bps > WHOLE_BPS:
        return f"its quality is {receipt.quality_bps} of {WHOLE_BPS}"
    if not 0 <= receipt.sequence < RECEIPTS_MOST:
        return f"its sequence is {receipt.sequence}, a ledger counts {RECEIPTS_MOST} receipts"
    if receipt.total_score < receipt.score:
        return f"its total score {receipt.total_score} is less than its own {receipt.score}"
    return ""

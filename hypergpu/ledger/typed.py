"""What nodes and the coordinator sign about work and pay, as EIP-712 typed data.

Three statements, told apart by the hash of their type::

    Contribution  the node: "this is the update I made, of this shard, from this model"
    Receipt       the coordinator: "I accepted it, for so many samples, of this quality"
    Voucher       the coordinator: "all your receipts together are worth this much by now"

The bytes are packed by hand, since the generic encoders take 20 times as long; the tests compare
them with one of those. A number that does not fit its field has no bytes and so no signature.
Signatures look as `hypergpu.signature` has them; `chain_form` gives what contracts expect.
"""

import struct
from collections.abc import Iterable
from functools import lru_cache
from struct import Struct

import msgspec

from hypergpu.digest import WIRE_BYTES, digest_of
from hypergpu.ids import Address, Digest, JobId, JobKey, Keccak, NodeId
from hypergpu.keys.keccak import keccak
from hypergpu.signature import SIGNATURE_BYTES, IdentityKey, signer_of
from hypergpu.units import BasisPoints, Bytes, Milliseconds, Samples, Wei

NOWHERE = Address("0x" + "00" * 20)
"""Whoever has no address."""

_ADDRESS_BYTES = 20
_NAME = keccak(b"HyperGPU")
_VERSION = keccak(b"1")
_DOMAIN_TYPE = keccak(
    b"EIP712Domain(string name,string version,uint256 chainId,address verifyingContract)"
)
_CONTRIBUTION_TYPE = keccak(
    b"Contribution(bytes32 job,uint32 epoch,uint32 round,address node,bytes32 shard,bytes32 model,"
    b"bytes32 update,uint64 samples,uint32 innerSteps,uint64 computeMs,uint64 updateBytes,"
    b"uint64 lease,uint64 nonce)"
)
_RECEIPT_TYPE = keccak(
    b"Receipt(bytes32 job,uint32 epoch,uint32 round,address node,uint64 sequence,"
    b"bytes32 contribution,uint64 samples,uint16 qualityBps,bytes32 evaluator)"
)
_VOUCHER_TYPE = keccak(b"Voucher(bytes32 job,address node,uint64 sequence,uint128 amount)")
_CONTRIBUTION = Struct(">32s32s28xI28xI12x20s32s32s32s24xQ28xI24xQ24xQ24xQ24xQ")
_RECEIPT = Struct(">32s32s28xI28xI12x20s24xQ32s24xQ30xH32s")
_VOUCHER = Struct(">32s32s12x20s24xQ16x16s")
_SHARD = Struct(">II")
_RANGE = Struct(">QQ")


class Domain(msgspec.Struct, frozen=True):
    """Which ledger a statement is for. A signature is worthless on any other."""

    chain_id: int = 0
    """0 while no chain settles the job."""
    contract: Address = NOWHERE

    def separator(self) -> bytes:
        """The 32 bytes that every signed digest begins with.

        Raises:
            ValueError: the contract's address is malformed.
            OverflowError: the chain id does not fit 256 bits.
        """
        chain_id = self.chain_id.to_bytes(32, "big")
        contract = bytes(12) + address_bytes(self.contract)
        return keccak(_DOMAIN_TYPE + _NAME + _VERSION + chain_id + contract)


class Contribution(msgspec.Struct, frozen=True, kw_only=True):
    """A node made this update under this lease. Signed by the node when it submits the update.

    How the bytes travel, from which offset and in how many stripes, is no part of it: digest and
    size are, and they are what the bytes are checked against once all are there.
    """

    job: JobKey
    epoch: int
    round: int
    node: NodeId
    shard: Digest
    """Of the positions trained on: see `shard_digest`."""
    model: Digest
    """Of the parameters that the training started from."""
    update: Digest
    samples: Samples
    """As assigned."""
    inner_steps: int
    """As taken."""
    compute_ms: Milliseconds
    """As the node says; nothing is paid by it."""
    update_bytes: Bytes
    lease: int
    nonce: int


class Receipt(msgspec.Struct, frozen=True, kw_only=True):
    """The coordinator accepted a contribution. Signed by it once the round is folded."""

    job: JobKey
    epoch: int
    round: int
    node: NodeId
    sequence: int
    """Dense for each node in a job, from 0."""
    contribution: Keccak
    """`struct_hash` of the contribution."""
    samples: Samples
    """As assigned, whatever the node says."""
    quality_bps: BasisPoints
    evaluator: Keccak
    """Keccak-256 of a short name of what measured the quality."""


class Voucher(msgspec.Struct, frozen=True, kw_only=True):
    """All that a node earned in a job so far. The newest replaces the others; it never falls.

    Whoever holds it is paid by the contract up to ``amount``, less what was paid before by
    whichever way.
    """

    job: JobKey
    node: NodeId
    sequence: int
    """How many receipts it counts."""
    amount: Wei


Statement = Contribution | Receipt | Voucher


def struct_hash(statement: Statement) -> bytes:
    """EIP-712's hashStruct: 32 bytes that name a statement, the same in every domain.

    Raises:
        ValueError: a digest or an address is malformed, or a number does not fit its field.
    """
    try:
        if isinstance(statement, Contribution):
            return _hash_of_contribution(statement)
        return keccak(_packed(statement))
    except (struct.error, OverflowError) as broken:
        raise ValueError(f"a number does not fit its field: {broken}") from broken


@lru_cache(4096)
def _hash_of_contribution(contribution: Contribution) -> bytes:
    """Needed for its signature when it comes, and again for its receipt when its round is over."""
    return keccak(_packed(contribution))


def signed_digest(separator: bytes, statement: Statement) -> bytes:
    """The 32 bytes that are signed. ``separator`` is that of the domain, computed once.

    Raises:
        ValueError: as `struct_hash`.
    """
    return digest_in(separator, struct_hash(statement))


def digest_in(separator: bytes, hashed: bytes) -> bytes:
    """The 32 bytes that are signed, where the statement's `struct_hash` is at hand already."""
    return keccak(b"\x19\x01" + separator + hashed)


def sign(key: IdentityKey, separator: bytes, statement: Statement) -> bytes:
    """Sign a statement: 65 bytes, the same each time. About 0.05 ms.

    Raises:
        ValueError: as `struct_hash`.
    """
    return key.sign_digest(signed_digest(separator, statement))


def signer(separator: bytes, statement: Statement, signature: bytes) -> str | None:
    """Whose address signed exactly this statement in this domain; None for what is no signature.

    Nothing from outside makes it raise. About 0.1 ms.
    """
    try:
        return signer_of(signed_digest(separator, statement), signature)
    except ValueError:
        return None


def is_contribution_of(
    node: NodeId, separator: bytes, statement: Contribution, signature: bytes
) -> bool:
    """Whether ``node`` signed this contribution as its own. In another's mouth it is false."""
    return statement.node == node and signer(separator, statement, signature) == node


def chain_form(signature: bytes) -> bytes:
    """The same signature with its last byte 27 or 28, as contracts take it."""
    if len(signature) != SIGNATURE_BYTES or signature[-1] > 1:
        raise ValueError("a signature is r | s | v, 65 bytes, and v is 0 or 1")
    return signature[:-1] + bytes([signature[-1] + 27])


def job_key(owner: Address | NodeId, job_id: JobId) -> JobKey:
    """A job's name on chain: it says whose it is, so that nobody else can open it first.

    Raises:
        ValueError: the owner's address is malformed.
    """
    salt = keccak(job_id.encode())
    return JobKey(keccak(bytes(12) + address_bytes(owner) + salt).hex())


def shard_digest(partition: int, ranges: Iterable[tuple[int, Samples]]) -> Digest:
    """Name the data that a participant trains on in a round.

    The canonical bytes are ``u32 partition | u32 count of ranges | (u64 start | u64 count)...``,
    big-endian. Which samples they are follows from the job.

    Args:
        partition: Of the job's data.
        ranges: Start and count, in the order in which they are trained on.

    Raises:
        ValueError: a number does not fit its field.
    """
    try:
        packed = [_RANGE.pack(start, count) for start, count in ranges]
        return digest_of(b"".join((_SHARD.pack(partition, len(packed)), *packed)))
    except struct.error as broken:
        raise ValueError(f"a number does not fit its field: {broken}") from broken


@lru_cache
def keccak_of(name: str) -> Keccak:
    """The form in which a short name goes into a receipt."""
    return Keccak(keccak(name.encode()).hex())


def address_bytes(address: Address | NodeId) -> bytes:
    """The 20 bytes of an address.

    Raises:
        ValueError: it is not ``0x`` and 40 lower-case hex digits.
    """
    content = _from_hex(address[2:])
    # Written back it shows whatever `bytes.fromhex` passes over, in a third of a pattern's time.
    if len(content) != _ADDRESS_BYTES or "0x" + content.hex() != address:
        raise ValueError(f"an address is 0x and 40 lower-case hex digits, not {address[:80]!r}")
    return content


def word_bytes(word: Digest | JobKey | Keccak) -> bytes:
    """The 32 bytes of a digest or a key.

    Raises:
        ValueError: it is not 64 lower-case hex digits.
    """
    content = _from_hex(word)
    if len(content) != WIRE_BYTES or content.hex() != word:
        raise ValueError(f"32 bytes are 64 lower-case hex digits, not {word[:80]!r}")
    return content


def _from_hex(digits: str) -> bytes:
    try:
        return bytes.fromhex(digits)
    except ValueError:
        return b""


def _packed(statement: Statement) -> bytes:
    match statement:
        case Contribution():
            return _CONTRIBUTION.pack(
                _CONTRIBUTION_TYPE,
                word_bytes(statement.job),
                statement.epoch,
                statement.round,
                address_bytes(statement.node),
                word_bytes(statement.shard),
                word_bytes(statement.model),
                word_bytes(statement.update),
                statement.samples,
                statement.inner_steps,
                statement.compute_ms,
                statement.update_bytes,
                statement.lease,
                statement.nonce,
            )
        case Receipt():
            return _RECEIPT.pack(
                _RECEIPT_TYPE,
                word_bytes(statement.job),
                statement.epoch,
                statement.round,
                address_bytes(statement.node),
                statement.sequence,
                word_bytes(statement.contribution),
                statement.samples,
                statement.quality_bps,
                word_bytes(statement.evaluator),
            )
        case Voucher():
            return _VOUCHER.pack(
                _VOUCHER_TYPE,
                word_bytes(statement.job),
                address_bytes(statement.node),
                statement.sequence,
                statement.amount.to_bytes(16, "big"),
            )

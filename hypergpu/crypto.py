"""A node's identity key (secp256k1), its signatures, the claim with which it joins, and the hashing
and signing of statements.

The claim's bytes, all integers big-endian and unsigned::

    u8 length | domain, ASCII: "hypergpu/v1/join"
    u32 length | token id, UTF-8  |  request digest[32]

The domain comes first and is length-prefixed, so no other statement shares these bytes. What is
signed is Keccak-256 of them; what is signed about work is typed data: `hypergpu.statements`. A
signature is ``r[32] | s[32] | v[1]`` with v 0 or 1 and s in the lower half, so it has no second
valid form. A node's id is the Ethereum address of its key: the last 20 bytes of Keccak-256 of the
public key.

Each statement packs its own words (`Statement.encode_data`): the generic encoders of typed data
take 20 times as long, and the tests compare the result with one of them. Contracts take signatures
in `chain_form`. Keys at rest are in `hypergpu.keys`.
"""

import re
import struct
from collections.abc import Callable
from functools import lru_cache
from typing import Protocol

import msgspec
from coincurve import PrivateKey, PublicKey

from hypergpu.digests import WIRE_BYTES, digest_to_wire
from hypergpu.errors import HyperGPUError, Reason
from hypergpu.ids import Address, Digest, NodeId, TokenId

try:
    from eth_hash.backends.pysha3 import keccak256
except ImportError:
    from eth_hash.backends.pycryptodome import keccak256

keccak: Callable[[bytes], bytes] = keccak256
"""The 32 bytes of the digest."""


@lru_cache(4096)
def address_text(public_key: bytes) -> str:
    """The address of an uncompressed secp256k1 key of 64 bytes: the last 20 of its Keccak-256.

    Remembered, since the same nodes sign again and again.
    """
    return "0x" + keccak(public_key)[-20:].hex()


SECRET_BYTES = 32
SIGNATURE_BYTES = 65
_JOIN = b"hypergpu/v1/join"
_NODE_ID = re.compile(r"0x[0-9a-f]{40}", re.ASCII)
_HALF_ORDER = 0x7FFFFFFFFFFFFFFFFFFFFFFFFFFFFFFF5D576E7357A4501DDFE92F46681B20A0
_UNCOMPRESSED = b"\x04"


class JoinClaim(msgspec.Struct, frozen=True):
    """The key holder asks for a certificate."""

    token_id: TokenId
    request_digest: Digest
    """Digest of the certificate request exactly as sent (PEM)."""


class IdentityKey:
    """A node's secp256k1 key. Its secret is shown only by `secret`, never by repr."""

    __slots__ = ("_key", "node_id", "public_key")

    def __init__(self, secret: bytes) -> None:
        """Take over a secret of 32 bytes.

        Raises:
            ValueError: it is not a number in [1, group order).
        """
        if len(secret) != SECRET_BYTES:
            raise ValueError(f"an identity key's secret is {SECRET_BYTES} bytes, not {len(secret)}")
        self._key = PrivateKey(secret)
        self.public_key = self._key.public_key.format(compressed=False)[1:]
        self.node_id = node_id_of(self.public_key)

    @classmethod
    def generate(cls) -> "IdentityKey":
        """Make a fresh key from the system's randomness."""
        return cls(PrivateKey().secret)

    @property
    def address(self) -> Address:
        """The node's id, as the account it is on a chain."""
        return Address(self.node_id)

    @property
    def secret(self) -> bytes:
        """The 32 bytes to keep readable by their owner alone."""
        return self._key.secret

    def sign(self, claim: JoinClaim) -> bytes:
        """Sign a claim: 65 bytes, the same each time (RFC 6979)."""
        return self.sign_digest(keccak(claim_bytes(claim)))

    def sign_digest(self, digest: bytes) -> bytes:
        """Sign 32 bytes that already are a digest of what is meant."""
        return self._key.sign_recoverable(digest, hasher=None)


def node_id_of(public_key: bytes) -> NodeId:
    """The id that a public key gives.

    Raises:
        HyperGPUError: SIGNATURE_INVALID, the bytes are not a point of the curve.
    """
    try:
        PublicKey(_UNCOMPRESSED + public_key)
    except ValueError:
        raise HyperGPUError(
            Reason.SIGNATURE_INVALID, "the public key is not an uncompressed secp256k1 point"
        ) from None
    return NodeId(address_text(public_key))


def is_node_id(text: str) -> bool:
    """Whether ``text`` is ``0x`` and 40 lower-case hex digits."""
    return _NODE_ID.fullmatch(text) is not None


def verify(node: NodeId, claim: JoinClaim, signature: bytes) -> bool:
    """Whether the holder of the key behind ``node`` signed exactly this claim. About 0.1 ms.

    A malformed digest makes it false, never an error, since it comes from outside.
    """
    try:
        digest = keccak(claim_bytes(claim))
    except ValueError:
        return False
    return signer_of(digest, signature) == node


def signer_of(digest: bytes, signature: bytes) -> NodeId | None:
    """Return the node whose key signed 32 bytes; None for a malformed signature.

    Some signer is found for almost any bytes: what counts is whether it is the one expected.
    """
    if len(signature) != SIGNATURE_BYTES or signature[64] > 1:
        return None
    if not 0 < int.from_bytes(signature[32:64], "big") <= _HALF_ORDER:
        return None
    try:
        key = PublicKey.from_signature_and_message(signature, digest, hasher=None)
    except ValueError:
        return None
    return NodeId(address_text(key.format(compressed=False)[1:]))


def claim_bytes(claim: JoinClaim) -> bytes:
    """The canonical bytes of a claim, as the module's docstring lays them out.

    Raises:
        ValueError: the digest is malformed.
    """
    return _domain(_JOIN) + _text(claim.token_id) + _digest(claim.request_digest)


def _domain(domain: bytes) -> bytes:
    return len(domain).to_bytes(1, "big") + domain


def _text(text: str) -> bytes:
    content = text.encode()
    return len(content).to_bytes(4, "big") + content


def _digest(digest: Digest) -> bytes:
    wire = digest_to_wire(digest)
    if len(wire) != WIRE_BYTES:
        raise ValueError(f"a digest is 32 bytes, not {len(wire)}")
    return wire


class Statement(Protocol):
    """Typed data that somebody signs."""

    def encode_data(self) -> bytes:
        """Type hash and fields, 32 bytes each.

        Raises:
            ValueError: A digest or an address is malformed.
            struct.error: A number does not fit its field.
        """


def struct_hash(statement: Statement) -> bytes:
    """EIP-712's hashStruct: 32 bytes that name a statement, the same in every domain.

    Raises:
        ValueError: A digest or an address is malformed, or a number does not fit its field.
    """
    try:
        return keccak(statement.encode_data())
    except (struct.error, OverflowError) as error:
        raise ValueError(f"a number does not fit its field: {error}") from error


def signed_digest(separator: bytes, hashed: bytes) -> bytes:
    """The 32 bytes that are signed.

    Args:
        separator: `Domain.separator` of the ledger.
        hashed: `struct_hash` of the statement.
    """
    return keccak(b"\x19\x01" + separator + hashed)


def sign(key: IdentityKey, separator: bytes, statement: Statement) -> bytes:
    """Sign a statement: 65 bytes, the same each time. About 0.05 ms.

    Raises:
        ValueError: As `struct_hash`.
    """
    return key.sign_digest(signed_digest(separator, struct_hash(statement)))


def signer(separator: bytes, statement: Statement, signature: bytes) -> str | None:
    """Address whose key signed exactly this statement in this domain; None if there is none.

    Safe for content from outside: it never raises. About 0.1 ms.
    """
    try:
        return signer_of(signed_digest(separator, struct_hash(statement)), signature)
    except ValueError:
        return None


def chain_form(signature: bytes) -> bytes:
    """The same signature with 27 or 28 as its last byte, as contracts take it.

    Raises:
        ValueError: It is not ``r | s | v`` with v 0 or 1.
    """
    if len(signature) != SIGNATURE_BYTES or signature[-1] > 1:
        raise ValueError("a signature is r | s | v, 65 bytes, and v is 0 or 1")
    return signature[:-1] + bytes([signature[-1] + 27])

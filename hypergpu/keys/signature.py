"""A node's identity key (secp256k1), its signatures, and the claim with which it joins.

The claim's bytes, all integers big-endian and unsigned::

    u8 length | domain, ASCII: "hypergpu/v1/join"
    u32 length | token id, UTF-8  |  request digest[32]

The domain comes first and is length-prefixed, so no other statement shares these bytes. What is
signed is Keccak-256 of them; what is signed about work is typed data: `hypergpu.statements`. A
signature is ``r[32] | s[32] | v[1]`` with v 0 or 1 and s in the lower half, so it has no second
valid form. A node's id is the Ethereum address of its key: the last 20 bytes of Keccak-256 of the
public key.
"""

import re

import msgspec
from coincurve import PrivateKey, PublicKey

from hypergpu.digest import WIRE_BYTES, digest_to_wire
from hypergpu.errors import HyperGPUError, Reason
from hypergpu.ids import Address, Digest, NodeId, TokenId
from hypergpu.keys.keccak import address_text, keccak

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
    encoded = text.encode()
    return len(encoded).to_bytes(4, "big") + encoded


def _digest(digest: Digest) -> bytes:
    wire = digest_to_wire(digest)
    if len(wire) != WIRE_BYTES:
        raise ValueError(f"a digest is 32 bytes, not {len(wire)}")
    return wire

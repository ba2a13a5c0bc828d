r"""Keys by which users sign what they order, and the order as it travels.

Keys are ed25519. What is signed begins with a domain, so that no statement passes for another::

    spec         "hypergpu/v1/work-spec\\0"  | the spec's msgpack, as it travels
    succession   "hypergpu/v1/spec-key\\0"   | the next public key, 32 bytes
    proof        "hypergpu/v1/key-proof\\0"  | the token's id

A key that replaces another one is signed by it. So whoever knows an older key of a user, as a node
that has seen it first, follows the chain to the newest and trusts nothing between.
"""

import msgspec
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from hypergpu.errors import HyperGPUError, Reason
from hypergpu.farm.work_spec import WorkSpec
from hypergpu.signed_spec import KeySuccession, SignedSpec

SPEC_BYTES_MOST = 32_768
SUCCESSIONS_MOST = 32
KEY_BYTES, SIGNATURE_BYTES = 32, 64
_SPEC, _SUCCESSION, _PROOF = (
    f"hypergpu/v1/{name}\0".encode() for name in ("work-spec", "spec-key", "key-proof")
)


def public_bytes(key: Ed25519PrivateKey) -> bytes:
    """The public key, 32 bytes."""
    return key.public_key().public_bytes_raw()


def sign_spec(
    key: Ed25519PrivateKey, spec: WorkSpec, successions: tuple[KeySuccession, ...] = ()
) -> SignedSpec:
    """Sign a user's order."""
    content = msgspec.msgpack.encode(spec)
    return SignedSpec(content, public_bytes(key), key.sign(_SPEC + content), successions)


def succession(key: Ed25519PrivateKey, next_key: bytes) -> KeySuccession:
    """A key's signature over the one that replaces it."""
    return KeySuccession(public_bytes(key), key.sign(_SUCCESSION + next_key))


def key_proof(key: Ed25519PrivateKey, token_id: str) -> bytes:
    """A key's signature over the token that registers it."""
    return key.sign(_PROOF + token_id.encode())


def is_proof(public_key: bytes, token_id: str, proof: bytes) -> bool:
    """Whether a key signed that this token registers it. Never raises."""
    return _is_signed(public_key, proof, _PROOF + token_id.encode())


def is_succession(before: KeySuccession, next_key: bytes) -> bool:
    """Whether a key named the next one. Never raises."""
    return _is_signed(before.public_key, before.signature, _SUCCESSION + next_key)


def read_spec(signed: SignedSpec) -> WorkSpec:
    """Check an order's signature, and read it.

    Raises:
        HyperGPUError: SIGNATURE_INVALID, it is not signed by its key; REQUEST_INVALID, it is too
            large or malformed.
    """
    if len(signed.spec) > SPEC_BYTES_MOST:
        detail = f"a signed spec has {len(signed.spec)} bytes, and {SPEC_BYTES_MOST} at most"
        raise HyperGPUError(Reason.REQUEST_INVALID, detail)
    if not _is_signed(signed.public_key, signed.signature, _SPEC + signed.spec):
        detail = "the signature is not that of its key over this spec"
        raise HyperGPUError(Reason.SIGNATURE_INVALID, detail, fix="sign the spec again")
    try:
        return msgspec.msgpack.decode(signed.spec, type=WorkSpec)
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        detail = f"the signed spec is malformed: {error}"
        raise HyperGPUError(Reason.REQUEST_INVALID, detail) from error


def key_line(signed: SignedSpec) -> tuple[bytes, ...]:
    """The keys that lead to the one which signed, the oldest first, itself last.

    Raises:
        HyperGPUError: SIGNATURE_INVALID, a key did not name the next one.
    """
    if len(signed.successions) > SUCCESSIONS_MOST:
        detail = f"a key follows on {len(signed.successions)} others, {SUCCESSIONS_MOST} at most"
        raise HyperGPUError(Reason.REQUEST_INVALID, detail)
    keys = (*(each.public_key for each in signed.successions), signed.public_key)
    for before, next_key in zip(signed.successions, keys[1:], strict=True):
        if not is_succession(before, next_key):
            detail = f"key {before.public_key.hex()[:16]}... did not name the next one"
            raise HyperGPUError(Reason.SIGNATURE_INVALID, detail)
    return keys


def _is_signed(public_key: bytes, signature: bytes, content: bytes) -> bool:
    if len(public_key) != KEY_BYTES or len(signature) != SIGNATURE_BYTES:
        return False
    try:
        Ed25519PublicKey.from_public_bytes(public_key).verify(signature, content)
    except (InvalidSignature, ValueError):
        return False
    return True

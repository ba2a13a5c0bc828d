"""The key by which this user's farm jobs are signed, kept on this machine alone.

A file for each token, readable by its user alone: ``spec-keys/TOKEN-ID.json`` beside the settings.
Jobs are signed where there is one; the coordinator never sees the private key.
"""

import time
from pathlib import Path

import msgspec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from msgspec.structs import replace

from hypergpu.durable import write_durably
from hypergpu.errors import HyperGPUError, Reason
from hypergpu.farm.map_request import MapRequest
from hypergpu.farm.spec_keys import key_proof, public_bytes, read_spec, sign_spec, succession
from hypergpu.farm.work_spec import work_spec
from hypergpu.signed_spec import KeySuccession, SignedSpec
from hypergpu.units import Wei
from hypergpu.user.client.connection import CoordinatorCalls
from hypergpu.user.client.settings import config_folder
from hypergpu.v1 import spec_pb2
from hypergpu.wire.specs import succession_message

ORDER_S = 30 * 86_400
"""Time for which a signed order is good: a job that runs longer is ordered again."""
_PRIVATE_MODES = 0o077


class _StoredKey(msgspec.Struct, frozen=True):
    private: bytes
    successions: tuple[KeySuccession, ...] = ()


class OwnKey(msgspec.Struct, frozen=True):
    """A key with those that it replaced."""

    key: Ed25519PrivateKey
    successions: tuple[KeySuccession, ...] = ()

    @property
    def public(self) -> bytes:
        """The public key, 32 bytes."""
        return public_bytes(self.key)

    def successor(self) -> "OwnKey":
        """A new key that this one named."""
        next_key = Ed25519PrivateKey.generate()
        before = succession(self.key, public_bytes(next_key))
        return OwnKey(next_key, (*self.successions, before))

    def sign(self, request: MapRequest, token_id: str) -> SignedSpec:
        """Sign what a request orders, good for `ORDER_S`."""
        spec = work_spec(request, token_id, int(time.time()) + ORDER_S)
        return sign_spec(self.key, spec, self.successions)

    def with_budget(self, signed: SignedSpec, budget: Wei) -> SignedSpec:
        """Sign an order again with another budget, good for `ORDER_S` from now.

        Args:
            signed: As the coordinator has it. Its signature is checked, as nobody else's word of
                what was ordered is signed here.
            budget: The new one.

        Raises:
            HyperGPUError: SIGNATURE_INVALID, neither this key nor one that it replaced signed it.
        """
        spec = read_spec(signed)
        own_keys = {self.public, *(each.public_key for each in self.successions)}
        if signed.public_key not in own_keys:
            detail = "the order of the job was signed by another key than this machine's"
            raise HyperGPUError(
                Reason.SIGNATURE_INVALID, detail, fix="raise it where the job was ordered"
            )
        ends_at_s = int(time.time()) + ORDER_S
        spec = replace(spec, budget=budget, ends_at_s=ends_at_s)
        return sign_spec(self.key, spec, self.successions)


class SpecKeyView(msgspec.Struct, frozen=True):
    """A registered key."""

    key: str
    """Hex of the public key."""
    token: str
    label: str
    registered_unix_s: int
    state: str
    """``good``, ``replaced`` or ``revoked``."""


class SpecKeyMade(msgspec.Struct, frozen=True, tag_field="schema", tag="hypergpu/spec-key/1"):
    """`token new-key`: the key, and where its private part lies."""

    key: str
    file: str


class SpecKeyList(msgspec.Struct, frozen=True, tag_field="schema", tag="hypergpu/spec-keys/1"):
    """`token keys`: registered keys."""

    keys: list[SpecKeyView]


def key_path(token_id: str) -> Path:
    """Where the key of a token's jobs lies."""
    return config_folder() / "spec-keys" / f"{token_id}.json"


def load_key(token_id: str) -> OwnKey | None:
    """The key of a token's jobs; None: there is none, and they are not signed.

    Raises:
        HyperGPUError: FILE_UNUSABLE, others can read it, or it is no key.
    """
    path = key_path(token_id)
    try:
        if path.stat().st_mode & _PRIVATE_MODES:
            fix = f"chmod 600 {path}; and where others had it: hypergpu token rotate-key"
            raise HyperGPUError(Reason.FILE_UNUSABLE, f"others can read {path}", fix=fix)
        stored_key = msgspec.json.decode(path.read_bytes(), type=_StoredKey)
        key = Ed25519PrivateKey.from_private_bytes(stored_key.private)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.MsgspecError, UnicodeError, ValueError) as error:
        fix = "put a copy back, or make another: hypergpu token new-key --force"
        raise HyperGPUError(Reason.FILE_UNUSABLE, f"{path} is no key: {error}", fix=fix) from error
    return OwnKey(key, stored_key.successions)


def keep_key(token_id: str, own_key: OwnKey) -> Path:
    """Keep a key for a token's jobs, in place of any other; returns where."""
    path = key_path(token_id)
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    content = _StoredKey(own_key.key.private_bytes_raw(), own_key.successions)
    write_durably(path, msgspec.json.encode(content))
    return path


def fresh_key() -> OwnKey:
    """A key that follows on no other."""
    return OwnKey(Ed25519PrivateKey.generate())


def registration(own_key: OwnKey, token_id: str, label: str) -> spec_pb2.RegisterSpecKeyRequest:
    """The call that registers a key for a token."""
    predecessor = own_key.successions[-1] if own_key.successions else None
    return spec_pb2.RegisterSpecKeyRequest(
        public_key=own_key.public,
        proof=key_proof(own_key.key, token_id),
        predecessor=None if predecessor is None else succession_message(predecessor),
        label=label,
    )


def key_views(answer: spec_pb2.ListSpecKeysResponse) -> list[SpecKeyView]:
    """Registered keys off the wire."""
    return [
        SpecKeyView(
            each.public_key.hex(), each.token_id, each.label, each.registered_unix_s, each.state
        )
        for each in answer.keys
    ]


def signature_of(calls: CoordinatorCalls, request: MapRequest) -> SignedSpec | None:
    """What this user signs of a request; None: there is no key here. Blocks on the disk."""
    token_id = calls.to.token.id
    own_key = load_key(token_id)
    return None if own_key is None else own_key.sign(request, token_id)


def resigned_budget(calls: CoordinatorCalls, signed: SignedSpec, budget: Wei) -> SignedSpec:
    """A job's order with another budget, signed by this user. Blocks on the disk.

    Raises:
        HyperGPUError: FILE_UNUSABLE, there is no key here; SIGNATURE_INVALID, as `OwnKey`.
    """
    token_id = calls.to.token.id
    own_key = load_key(token_id)
    if own_key is None:
        detail = f"the order of the job is signed, and {key_path(token_id)} is not there"
        fix = "raise the budget where the job was ordered, with its token"
        raise HyperGPUError(Reason.FILE_UNUSABLE, detail, fix=fix)
    return own_key.with_budget(signed, budget)

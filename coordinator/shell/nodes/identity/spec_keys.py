"""Keys by which users sign what they order: registered, listed, replaced and revoked.

A token's holder registers keys for it; nobody else can, as the key itself signs the token's id. The
private keys never come here.
"""

import threading

from msgspec.structs import replace

from coordinator.shell.store.journal.records import SpecKeyRecord
from coordinator.shell.store.journal.registry import Registry
from hypergpu.errors import HyperGPUError, Reason
from hypergpu.farm.spec_keys import KEY_BYTES, is_proof, is_succession
from hypergpu.ids import TokenId
from hypergpu.signed_spec import KeySuccession, SignedSpec

GOOD, REPLACED, REVOKED = "good", "replaced", "revoked"
_KEYS_MOST = 64
"""Keys of one token."""
_LABEL_LENGTH_MOST = 100


class SpecKeys:
    """Register, list, check and revoke. Calls block: call them from a thread."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._lock = threading.Lock()

    def register(
        self, record: SpecKeyRecord, proof: bytes, predecessor: KeySuccession | None
    ) -> None:
        """Register a key for a token; the same again changes nothing.

        Args:
            record: The key, its token and label.
            proof: The key's signature over the token.
            predecessor: The key that it replaces, with that key's signature over it; None: it
                stands alone.

        Raises:
            HyperGPUError: SIGNATURE_INVALID, the proof or the succession does not hold;
                REQUEST_INVALID, it is no key or another token's; LIMIT_REACHED.
        """
        if len(record.public_key) != KEY_BYTES or not record.label.isprintable():
            detail = f"a key has {KEY_BYTES} bytes and a printable label"
            raise HyperGPUError(Reason.REQUEST_INVALID, detail)
        if not is_proof(record.public_key, record.token_id, proof):
            detail = f"the key did not sign that token {record.token_id} registers it"
            raise HyperGPUError(Reason.SIGNATURE_INVALID, detail)
        with self._lock:
            known_keys = {each.public_key: each for each in self._registry.spec_keys()}
            own_count = sum(each.token_id == record.token_id for each in known_keys.values())
            known_key = known_keys.get(record.public_key)
            if known_key is not None:
                _require_same(known_key, record)
                return
            if own_count >= _KEYS_MOST:
                detail = f"token {record.token_id} has {own_count} keys, which is the most"
                raise HyperGPUError(Reason.LIMIT_REACHED, detail)
            if predecessor is not None:
                before = known_keys.get(predecessor.public_key)
                _require_good(before, record.token_id, predecessor.public_key)
                if not is_succession(predecessor, record.public_key):
                    detail = f"key {_short(predecessor.public_key)} did not sign its successor"
                    raise HyperGPUError(Reason.SIGNATURE_INVALID, detail)
                self._registry.change_spec_key(predecessor.public_key, REPLACED)
            label = record.label[:_LABEL_LENGTH_MOST]
            self._registry.add_spec_key(replace(record, label=label, state=GOOD))

    def keys(self, token_id: TokenId | None) -> tuple[SpecKeyRecord, ...]:
        """Keys of a token, by registration; None: of all."""
        return tuple(
            each for each in self._registry.spec_keys() if token_id in (None, each.token_id)
        )

    def require_good(self, token_id: TokenId, signed: SignedSpec) -> None:
        """Refuse a spec whose key is not the token's, or is good no more.

        Raises:
            HyperGPUError: SIGNATURE_INVALID.
        """
        known_keys = {each.public_key: each for each in self._registry.spec_keys()}
        _require_good(known_keys.get(signed.public_key), token_id, signed.public_key)

    def revoke(self, token_id: TokenId | None, public_key: bytes) -> None:
        """Revoke a key for good.

        Args:
            token_id: Whose key it must be; None: anybody's.
            public_key: The key.

        Raises:
            HyperGPUError: REQUEST_INVALID, there is no such key of the token.
        """
        with self._lock:
            keys = {each.public_key for each in self.keys(token_id)}
            if public_key not in keys:
                detail = f"there is no key {_short(public_key)} of this token"
                fix = "list them: hypergpu token keys"
                raise HyperGPUError(Reason.REQUEST_INVALID, detail, fix=fix)
            self._registry.change_spec_key(public_key, REVOKED)


def _require_same(known: SpecKeyRecord, record: SpecKeyRecord) -> None:
    if known.token_id != record.token_id or known.state != GOOD:
        detail = f"key {_short(known.public_key)} is {known.state}, of token {known.token_id}"
        fix = "make another: hypergpu token new-key"
        raise HyperGPUError(Reason.REQUEST_INVALID, detail, fix=fix)


def _require_good(known: SpecKeyRecord | None, token_id: TokenId, public_key: bytes) -> None:
    if known is None or known.token_id != token_id:
        detail = f"key {_short(public_key)} is not registered for token {token_id}"
        fix = "register it: hypergpu token new-key"
        raise HyperGPUError(Reason.SIGNATURE_INVALID, detail, fix=fix)
    if known.state != GOOD:
        detail = f"key {_short(public_key)} of token {token_id} is {known.state}"
        fix = "sign with the newest: hypergpu token rotate-key"
        raise HyperGPUError(Reason.SIGNATURE_INVALID, detail, fix=fix)


def _short(public_key: bytes) -> str:
    return f"{public_key.hex()[:16]}..."

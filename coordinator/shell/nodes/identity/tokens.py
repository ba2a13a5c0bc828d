"""Hands out tokens and judges them. A keyed hash of each secret is kept, never the secret.

Every token is held in memory beside the journal, so that a call's token is judged without a query.
That is sound because a journal belongs to one coordinator.
"""

import secrets
import threading
from collections.abc import Callable

import msgspec
from blake3 import blake3
from msgspec.structs import replace

from coordinator.shell.store.journal.records import TokenRecord
from coordinator.shell.store.journal.registry import Registry
from hypergpu.errors import HyperGPUError, Reason
from hypergpu.ids import Digest, NodeId, TokenId
from hypergpu.wire.credentials import Credential, Role, Token

_HASH_CONTEXT = "hypergpu 2025 token secret"
_ID_BYTES = 6
_SECRET_BYTES = 32
_NOBODY = bytes(32)


class TokenGrant(msgspec.Struct, frozen=True):
    """What an operator asks for."""

    role: Role
    ttl_s: int
    """0 never expires."""
    uses: int
    """How many nodes may join with it; 0 is unlimited. Other calls use nothing up."""
    label: str = ""


class IssuedTokens:
    """Create, list, revoke, check and spend."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._lock = threading.Lock()
        self._tokens = {record.token_id: record for record in registry.tokens()}
        self._watchers: dict[TokenId, dict[object, Callable[[], None]]] = {}
        """By a mark of each: a gateway's token has thousands."""

    def create(
        self, grant: TokenGrant, *, addresses: tuple[str, ...], authority: Digest, now_s: int
    ) -> Token:
        """Make a token. Its secret is in the answer and nowhere else.

        Raises:
            HyperGPUError: REQUEST_INVALID, a negative time or count.
        """
        if grant.ttl_s < 0 or grant.uses < 0:
            raise HyperGPUError(Reason.REQUEST_INVALID, "ttl and uses are 0 or more")
        token_id = TokenId(secrets.token_hex(_ID_BYTES))
        secret = secrets.token_urlsafe(_SECRET_BYTES)
        record = TokenRecord(
            token_id=token_id,
            role=grant.role,
            label=grant.label,
            secret_hash=_secret_hash(token_id, secret),
            created_s=now_s,
            expires_s=now_s + grant.ttl_s if grant.ttl_s else 0,
            uses_left=grant.uses or None,
        )
        with self._lock:
            self._registry.add_token(record)
            self._tokens[token_id] = record
        return Token(addresses, authority, grant.role, token_id, secret)

    def tokens(self) -> tuple[TokenRecord, ...]:
        """Every token, by creation."""
        with self._lock:
            records = list(self._tokens.values())
        return tuple(sorted(records, key=lambda one: (one.created_s, one.token_id)))

    def revoke(self, token_id: TokenId) -> frozenset[NodeId]:
        """Void a token for good, durably with every node that joined with it; returns those nodes.

        Blocks: call it from a thread.

        Raises:
            HyperGPUError: TOKEN_UNKNOWN.
        """
        with self._lock:
            record = self._tokens.get(token_id)
            if record is None:
                raise HyperGPUError(Reason.TOKEN_UNKNOWN, f"there is no token {token_id[:40]!r}")
            # Memory first: a join that is under way finds one or the other (`Enrolment`).
            self._tokens[token_id] = replace(record, is_revoked=True)
            self._registry.revoke_token(token_id)
            watchers = tuple(self._watchers.get(token_id, {}).values())
        for act in watchers:
            act()
        return self._registry.joined_nodes(token_id)

    def watch(self, token_id: TokenId, act: Callable[[], None]) -> Callable[[], None]:
        """Have an action called, by any thread, once a token is revoked; returns the undoing."""
        mark = object()
        with self._lock:
            self._watchers.setdefault(token_id, {})[mark] = act

        def undo() -> None:
            with self._lock:
                del self._watchers[token_id][mark]
                if not self._watchers[token_id]:
                    del self._watchers[token_id]

        return undo

    def check(self, credential: Credential, roles: frozenset[Role], now_s: int) -> TokenRecord:
        """Judge the token of a call, in memory. An unknown id takes as long as a wrong secret.

        Lifetime and uses of a node's token limit who joins with it: whoever joined sees and steers
        those nodes with it until it is revoked.

        Raises:
            HyperGPUError: TOKEN_INVALID, TOKEN_REVOKED, TOKEN_EXPIRED, TOKEN_USED_UP or
                ROLE_FORBIDDEN.
        """
        record = self._right(credential)
        _check_callable(record, now_s)
        _check_role(record, roles)
        return record

    def check_current(self, token_id: TokenId, now_s: int) -> None:
        """Judge a token that was right when its stream began.

        Raises:
            HyperGPUError: TOKEN_REVOKED, TOKEN_EXPIRED or TOKEN_USED_UP; TOKEN_INVALID, there is
                none of this id.
        """
        record = self._tokens.get(token_id)
        if record is None:
            raise HyperGPUError(Reason.TOKEN_INVALID, f"there is no token {token_id}")
        _check_callable(record, now_s)

    def is_revoked(self, token_id: TokenId) -> bool:
        """Whether a known token was revoked."""
        return self._tokens[token_id].is_revoked

    def joined_nodes(self, token_id: TokenId) -> frozenset[NodeId]:
        """Nodes that joined with a token. Blocks: call it from a thread."""
        return self._registry.joined_nodes(token_id)

    def check_join(self, credential: Credential, node: NodeId, now_s: int) -> TokenRecord:
        """Judge the token of a join without taking a use. Blocks: call it from a thread.

        A node that joined with this token before joins again for nothing, even when the token has
        expired or is used up: its answer may have been lost, or it slept past its certificate.

        Raises:
            HyperGPUError: as `check`.
        """
        record = self._right(credential)
        _check_role(record, frozenset({Role.NODE}))
        if record.is_revoked or not self._has_joined(record, node):
            _check_current(record, now_s)
        return record

    def _has_joined(self, record: TokenRecord, node: NodeId) -> bool:
        return record.token_id in self._registry.joined_tokens(node)

    def spend(self, credential: Credential, node: NodeId, now_s: int) -> TokenRecord:
        """Judge a join as `check_join` and take one use, durably. Blocks: call it from a thread.

        The caller has checked the node's signature.

        Raises:
            HyperGPUError: as `check`.
        """
        record = self.check_join(credential, node, now_s)
        with self._lock:
            if not self._registry.spend_token(record.token_id, node, now_s):
                raise HyperGPUError(
                    Reason.TOKEN_USED_UP, f"token {record.token_id} has no uses left"
                )
            spent_record = self._registry.token(record.token_id) or record
            self._tokens[record.token_id] = spent_record
            return spent_record

    def _right(self, credential: Credential) -> TokenRecord:
        # One look-up in a dictionary needs no lock, and must not wait for a join's transaction.
        record = self._tokens.get(credential.token_id)
        presented_hash = _secret_hash(credential.token_id, credential.secret)
        is_right = secrets.compare_digest(presented_hash, record.secret_hash if record else _NOBODY)
        if record is None or not is_right:
            raise HyperGPUError(Reason.TOKEN_INVALID, "the token's id or secret is wrong")
        return record


def _check_role(record: TokenRecord, roles: frozenset[Role]) -> None:
    if record.role not in roles:
        role_names = " or ".join(sorted(role.value for role in roles))
        raise HyperGPUError(
            Reason.ROLE_FORBIDDEN, f"this takes the role {role_names}, not {record.role.value}"
        )


def _check_callable(record: TokenRecord, now_s: int) -> None:
    if record.role is not Role.NODE:
        _check_current(record, now_s)
    elif record.is_revoked:
        raise HyperGPUError(Reason.TOKEN_REVOKED, f"token {record.token_id} was revoked")


def _check_current(record: TokenRecord, now_s: int) -> None:
    if record.is_revoked:
        raise HyperGPUError(Reason.TOKEN_REVOKED, f"token {record.token_id} was revoked")
    if 0 < record.expires_s <= now_s:
        late_s = now_s - record.expires_s
        raise HyperGPUError(Reason.TOKEN_EXPIRED, f"token {record.token_id} expired {late_s} s ago")
    if record.uses_left == 0:
        raise HyperGPUError(Reason.TOKEN_USED_UP, f"token {record.token_id} has no uses left")


def _secret_hash(token_id: TokenId, secret: str) -> bytes:
    # Secrets have 256 random bits: no slow hash is needed, and a fast one cannot load us.
    key = blake3(token_id.encode(), derive_key_context=_HASH_CONTEXT).digest()
    return blake3(secret.encode(), key=key).digest()

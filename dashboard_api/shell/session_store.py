"""Sessions: a cookie's secret opens the sealed token that its holder acts with.

The database holds no token that it could open: the key is made of the cookie, of which it has only
a digest. So sessions survive a restart of the dashboard, and a stolen database is worth nothing.
"""

import os
import secrets
from typing import Any, NamedTuple

import msgspec
from blake3 import blake3
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from sqlalchemy import delete, func, select

from dashboard_api.core.sessions import SESSION_GOOD_MS, SESSIONS_MAX, secret_digest
from dashboard_api.shell.schema import SESSIONS
from hypergpu.errors import HyperGPUError, Reason
from hypergpu.wire.credentials import Role, Token, parse_token, token_text

_KEY_CONTEXT = "hypergpu dashboard 2026 key of a session's token"
_NONCE_BYTES = 12
COOKIE_MOST = 128


class StoredSession(NamedTuple):
    """Session of a cookie, as it was opened."""

    token: Token
    ends_at_ms: int


class Session(msgspec.Struct, frozen=True):
    """Who asks: the holder of a token that the coordinator has taken."""

    token: Token
    role: Role
    """What the coordinator says it is."""
    ends_at_ms: int

    @property
    def is_node_owner(self) -> bool:
        """Whether it sees and steers the nodes that joined with its token, and no others."""
        return self.role is Role.NODE

    @property
    def key(self) -> str:
        """Id of the token: whatever is counted or kept for its holder goes by it."""
        return self.token.id


class SessionStore:
    """Sessions in the history's database; calls block."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    def open_session(self, token: Token, now_ms: int) -> tuple[str, StoredSession]:
        """Start a session; returns the cookie's value."""
        cookie = secrets.token_urlsafe(32)
        session = StoredSession(token, now_ms + SESSION_GOOD_MS)
        nonce = os.urandom(_NONCE_BYTES)
        sealed_token = nonce + AESGCM(_key(cookie)).encrypt(nonce, token_text(token).encode(), None)
        row = {
            "digest": secret_digest(cookie),
            "sealed": sealed_token,
            "ends_at_ms": session.ends_at_ms,
        }
        with self._engine.begin() as connection:
            connection.execute(delete(SESSIONS).where(SESSIONS.c.ends_at_ms <= now_ms))
            count = connection.scalar(select(func.count()).select_from(SESSIONS))
            if count >= SESSIONS_MAX:
                # The one that ends first gives way: its holder takes a fresh link.
                oldest = select(SESSIONS.c.digest).order_by(SESSIONS.c.ends_at_ms).limit(1)
                connection.execute(
                    delete(SESSIONS).where(SESSIONS.c.digest == oldest.scalar_subquery())
                )
            connection.execute(SESSIONS.insert(), [row])
        return cookie, session

    def find_session(self, cookie: str, now_ms: int) -> StoredSession | None:
        """The session that a cookie opens; None: there is none any more."""
        if not cookie or len(cookie) > COOKIE_MOST:
            return None
        with self._engine.connect() as connection:
            condition = SESSIONS.c.digest == secret_digest(cookie)
            row = connection.execute(select(SESSIONS).where(condition)).first()
        if row is None or row.ends_at_ms <= now_ms:
            return None
        sealed_token = bytes(row.sealed)
        try:
            token_bytes = AESGCM(_key(cookie)).decrypt(
                sealed_token[:_NONCE_BYTES], sealed_token[_NONCE_BYTES:], None
            )
        except InvalidTag:
            return None
        return StoredSession(parse_token(token_bytes.decode()), row.ends_at_ms)

    def end_session(self, cookie: str) -> None:
        """Forget a session."""
        with self._engine.begin() as connection:
            connection.execute(delete(SESSIONS).where(SESSIONS.c.digest == secret_digest(cookie)))


def user_token(text: str, own: Token) -> Token:
    """A token that a person pasted, for the coordinator that this server shows and no other.

    Raises:
        HyperGPUError: It is no token, or another coordinator's.
    """
    token = parse_token(text)
    if token.authority != own.authority:
        detail = "the token is of another coordinator than the one shown here"
        raise HyperGPUError(Reason.TOKEN_INVALID, detail)
    return token


def _key(cookie: str) -> bytes:
    return blake3(cookie.encode(), derive_key_context=_KEY_CONTEXT).digest()

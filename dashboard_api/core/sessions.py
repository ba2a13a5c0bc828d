"""One-time codes and who may ask what. Secrets are arguments, known by their digests only."""

import hmac
from collections.abc import Sequence

import msgspec

from hypergpu.digests import digest_of

CODE_GOOD_MS = 600_000
SESSION_GOOD_MS = 12 * 3_600_000
TRIES_MAX = 10
TRIES_WINDOW_MS = 60_000
SESSIONS_MAX = 256


class OneTimeCode(msgspec.Struct, frozen=True):
    """A code that was printed and not used."""

    digest: str
    made_at_ms: int


class CodeBook:
    """Codes that may still be exchanged for a session."""

    def __init__(self) -> None:
        self._codes: list[OneTimeCode] = []
        self._failed_at_ms: list[int] = []

    def add(self, code: str, now_ms: int) -> None:
        """Let a code be exchanged once within ten minutes."""
        self._codes.append(OneTimeCode(secret_digest(code), now_ms))

    def redeem(self, code: str, now_ms: int) -> str:
        """Use a code up; returns why it is refused, empty on success."""
        self._failed_at_ms = [
            at_ms for at_ms in self._failed_at_ms if now_ms - at_ms < TRIES_WINDOW_MS
        ]
        if len(self._failed_at_ms) >= TRIES_MAX:
            return "too many wrong codes: wait a minute"
        self._codes = [each for each in self._codes if now_ms - each.made_at_ms < CODE_GOOD_MS]
        given_digest = secret_digest(code)
        for each in self._codes:
            if hmac.compare_digest(each.digest, given_digest):
                self._codes.remove(each)
                return ""
        self._failed_at_ms.append(now_ms)
        return "the link was used already or is older than ten minutes"


def secret_digest(secret: str) -> str:
    """Name of a secret that does not tell it."""
    return digest_of(secret.encode("utf-8"))


class AccessRequest(msgspec.Struct, frozen=True):
    """What decides whether a request is looked at. Names of headers are lower case."""

    method: str
    host: str
    origin: str
    """Empty: the client sent none."""
    is_upgrade: bool
    has_bearer: bool
    """Whether it carries a token in ``Authorization``, which no other site's page can add."""


READING = frozenset({"GET", "HEAD"})


def access_refusal(request: AccessRequest, hosts: Sequence[str], origins: Sequence[str]) -> str:
    """Why a request is refused before anything of it is read; empty: it is not.

    A name that leads here but is not ours may be another site's (DNS rebinding), so each request
    names a known host. What changes something, and the feed, names a known origin: another site's
    page would send its own.
    """
    if request.host not in hosts:
        return f"the host {request.host!r} is not one of this server's names"
    is_reading = request.method in READING and not request.is_upgrade
    if request.origin and request.origin not in origins and not is_reading:
        return f"the origin {request.origin!r} is not this page"
    if not request.origin and not is_reading and not request.has_bearer:
        return "the request names no origin and carries no token"
    return ""


def known_hosts(names: Sequence[str], port: int) -> list[str]:
    """Values of ``Host`` by which the server may be called."""
    return [f"{name}:{port}" for name in names] + ([*names] if port in (80, 443) else [])


def known_origins(hosts: Sequence[str]) -> list[str]:
    """Values of ``Origin`` of our own page."""
    return [f"{scheme}://{host}" for host in hosts for scheme in ("http", "https")]

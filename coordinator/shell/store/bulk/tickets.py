"""Claims of tickets, and the keyed code by which a bulk process knows them without asking."""

import base64
import binascii
import hmac

import msgspec

from hypergpu.ids import NodeId
from hypergpu.units import Bytes, Milliseconds

LIFE_MS = 60_000
SECRET_BYTES = 32
SCHEME = "HyperGPU-Ticket"
"""First word of the header ``Authorization``."""
_CODE_BYTES = 32
_TEXT_LENGTH_MAX = 1024


class Claims(msgspec.Struct, frozen=True, array_like=True):
    """What the bearer of a ticket may do."""

    method: str
    name: str
    """Digest of the blob to fetch, or name of the upload to send."""
    size_bytes: Bytes
    bearer: NodeId | None
    """Node that shows it; None: a user, who has no certificate."""
    purpose: str
    """Job whose model the blob is; empty for other blobs."""
    expires_ms: Milliseconds
    """Monotonic, which all processes of a machine share."""


def authorization(claims: Claims, secret: bytes) -> str:
    """Value of the header ``Authorization``."""
    content = msgspec.msgpack.encode(claims)
    return f"{SCHEME} {base64.urlsafe_b64encode(_code(content, secret) + content).decode()}"


def claims_in(value: str, secret: bytes, now_ms: Milliseconds) -> Claims | None:
    """Claims in a header; None when they are not ours, were altered or have expired."""
    scheme, _, text = value.partition(" ")
    if scheme != SCHEME or len(text) > _TEXT_LENGTH_MAX:
        return None
    try:
        raw = base64.b64decode(text, altchars=b"-_", validate=True)
    except (binascii.Error, ValueError):
        return None
    code, content = raw[:_CODE_BYTES], raw[_CODE_BYTES:]
    if not hmac.compare_digest(code, _code(content, secret)):
        return None
    claims = msgspec.msgpack.decode(content, type=Claims)
    return claims if now_ms < claims.expires_ms else None


def _code(packed: bytes, secret: bytes) -> bytes:
    return hmac.digest(secret, packed, "sha256")

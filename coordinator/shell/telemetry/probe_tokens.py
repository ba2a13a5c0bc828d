"""Probe tokens: which datagrams are sent back. A stranger who has none can have nobody flooded.

A token is a version byte, the node, until when it is good, and a keyed BLAKE3 over these under a
secret of this start. Nothing is kept for it: whoever says it is asked only whether it is ours.
"""

import hmac
import secrets
import struct

from blake3 import blake3

from hypergpu.ids import NodeId
from hypergpu.units import Milliseconds
from hypergpu.wire.probing import TOKEN_BYTES

LIFE_MS = 600_000
RENEWAL_MS = LIFE_MS // 2
"""A stream that lasts is given a fresh token as often."""
_KEY_BYTES = 32
_VERSION = 1
_NODE_BYTES = 20
_CLAIM = struct.Struct(f">B{_NODE_BYTES}sQ")
_SEAL_BYTES = TOKEN_BYTES - _CLAIM.size


class ProbeTokens:
    """Makes tokens and knows its own."""

    def __init__(self, secret: bytes = b"") -> None:
        """``secret``: 32 bytes; fresh ones unless given."""
        self._secret = secret or secrets.token_bytes(_KEY_BYTES)

    def token(self, node: NodeId, now_ms: Milliseconds) -> bytes:
        """A token for a node, good for ten minutes of monotonic time."""
        claim = _CLAIM.pack(_VERSION, bytes.fromhex(node.removeprefix("0x")), now_ms + LIFE_MS)
        return claim + self._seal(claim)

    def bearer(self, token: bytes, now_ms: Milliseconds) -> NodeId | None:
        """Whose token it is; None when it is not ours, was altered or is past its time."""
        claim, seal = token[: _CLAIM.size], token[_CLAIM.size :]
        if len(seal) != _SEAL_BYTES:
            return None
        version, node, good_until_ms = _CLAIM.unpack(claim)
        if version != _VERSION or good_until_ms <= now_ms:
            return None
        if not hmac.compare_digest(seal, self._seal(claim)):
            return None
        return NodeId(f"0x{node.hex()}")

    def _seal(self, claim: bytes) -> bytes:
        return blake3(claim, key=self._secret).digest(length=_SEAL_BYTES)

"""Tokens that let probe datagrams be sent back: keyed hashes, of which nothing is stored."""

import hmac
import secrets
import struct

from blake3 import blake3

from hypergpu.ids import NodeId
from hypergpu.units import Milliseconds
from hypergpu.wire.datagrams import TOKEN_BYTES

LIFE_MS = 600_000
RENEWAL_MS = LIFE_MS // 2
"""A stream that lasts gets a fresh token this often."""
_KEY_BYTES = 32
_VERSION = 1
_NODE_BYTES = 20
_CLAIM = struct.Struct(f">B{_NODE_BYTES}sQ")
_CODE_BYTES = TOKEN_BYTES - _CLAIM.size


class ProbeTokens:
    """Makes tokens and recognises them."""

    def __init__(self, secret: bytes = b"") -> None:
        """``secret``: 32 bytes; fresh ones unless given."""
        self._secret = secret or secrets.token_bytes(_KEY_BYTES)

    def token(self, node: NodeId, now_ms: Milliseconds) -> bytes:
        """A token for a node, good for ten minutes of monotonic time."""
        claim = _CLAIM.pack(_VERSION, bytes.fromhex(node.removeprefix("0x")), now_ms + LIFE_MS)
        return claim + self._code(claim)

    def bearer(self, token: bytes, now_ms: Milliseconds) -> NodeId | None:
        """Node that holds the token; None when it is not ours, was altered or has expired."""
        claim, code = token[: _CLAIM.size], token[_CLAIM.size :]
        if len(code) != _CODE_BYTES:
            return None
        version, node, expires_ms = _CLAIM.unpack(claim)
        if version != _VERSION or expires_ms <= now_ms:
            return None
        if not hmac.compare_digest(code, self._code(claim)):
            return None
        return NodeId(f"0x{node.hex()}")

    def _code(self, claim: bytes) -> bytes:
        return blake3(claim, key=self._secret).digest(length=_CODE_BYTES)

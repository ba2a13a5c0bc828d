"""Which replica has read how much of a prompt already. Pure: digests of its beginnings, no text.

A prompt is laid out as bytes, so that the next turn of a conversation begins with the bytes of the
one before. A digest is taken every `MARK_BYTES` and behind each turn; it stands for all that is
before it. A replica is expected to hold what answers of the same scope had it read; what it says of
each answer puts that right.
"""

import json
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from blake3 import blake3

from hypergpu.serving.calls import PREFIX_MS, ModelCall
from hypergpu.units import Milliseconds

MARK_BYTES = 512
MARKS_MOST = 2_048
"""Digests of a prompt at most: what follows on the last one counts as unread."""
HELD_MARKS_MOST = 8_192
"""Digests of a replica at most, about 1 MB: those used least lately go first."""
TOKEN_BYTES = 4
"""Bytes of a prompt that are taken for one token."""
_DIGEST_BYTES = 16


class PromptMark(NamedTuple):
    """A place in a prompt."""

    digest: bytes
    """Digest of the scope and of all bytes before it."""
    tokens: int
    """Tokens before it, as far as its bytes tell."""


class PromptPrefixes(NamedTuple):
    """A prompt as the router sees it."""

    marks: tuple[PromptMark, ...] = ()
    """From the front; empty: it has no scope, and nothing of it is kept anywhere."""
    tokens: int = 0
    """Tokens of all of it, as far as its bytes tell."""


def prompt_prefixes(call: ModelCall, key: bytes) -> PromptPrefixes:
    """The places of a call's prompt.

    Args:
        call: With the scope that replicas get.
        key: 32 secret bytes of this process, so that a digest tells nothing of a text.
    """
    pieces = [*_pieces(call)]
    size_bytes = sum(map(len, pieces))
    if not call.prefix_scope:
        return PromptPrefixes((), size_bytes // TOKEN_BYTES)
    hasher = blake3(f"{call.prefix_scope}\n".encode(), key=key)
    marks: list[PromptMark] = []
    read_bytes = 0
    for piece in pieces:
        for begin in range(0, len(piece), MARK_BYTES):
            part = piece[begin : begin + MARK_BYTES]
            hasher.update(part)
            read_bytes += len(part)
            marks.append(PromptMark(hasher.digest(_DIGEST_BYTES), read_bytes // TOKEN_BYTES))
            if len(marks) == MARKS_MOST:
                return PromptPrefixes(tuple(marks), size_bytes // TOKEN_BYTES)
    return PromptPrefixes(tuple(marks), size_bytes // TOKEN_BYTES)


def _pieces(call: ModelCall) -> Iterator[bytes]:
    """The prompt in its order; a piece begins where a turn does."""
    if call.tokens is not None:
        yield b"".join(token.to_bytes(8, "little")[:TOKEN_BYTES] for token in call.tokens)
    elif call.text is not None:
        yield call.text.encode("utf-8", "replace")
    else:
        for part in (*call.tools, *(call.messages or ())):
            yield json.dumps(part, ensure_ascii=False).encode("utf-8", "replace")


class HeldPrefixes:
    """What a replica is expected to hold, by digests."""

    def __init__(self) -> None:
        self._used_ms: dict[bytes, Milliseconds] = {}
        """When each was used last, the newest last."""

    def __len__(self) -> int:
        return len(self._used_ms)

    def tokens_of(self, marks: Sequence[PromptMark], now_ms: Milliseconds) -> int:
        """Tokens of a prompt that it holds."""
        for mark in reversed(marks):
            used_ms = self._used_ms.get(mark.digest)
            if used_ms is not None and now_ms - used_ms < PREFIX_MS:
                return mark.tokens
        return 0

    def note_read(self, marks: Sequence[PromptMark], now_ms: Milliseconds) -> None:
        """A call is over there: its replica keeps what it has read."""
        for mark in marks:
            self._used_ms.pop(mark.digest, None)
            self._used_ms[mark.digest] = now_ms
        while len(self._used_ms) > HELD_MARKS_MOST:
            del self._used_ms[next(iter(self._used_ms))]

    def note_missing(self, marks: Sequence[PromptMark], held_share: float) -> None:
        """The replica held less than expected.

        Args:
            marks: Of the prompt.
            held_share: Part of its tokens that was held, from 0 to 1.
        """
        held_tokens = held_share * marks[-1].tokens if marks else 0.0
        for mark in marks:
            if mark.tokens > held_tokens:
                self._used_ms.pop(mark.digest, None)

"""How the tokens of answers are counted and priced: whole units, the same for both ends.

A unit is one token that was written. Reading is cheaper than writing: `PROMPT_TOKENS_PER_UNIT`
tokens of prompts are one unit. A window's prompt tokens are summed first and rounded up once.

Of a stage of a ring whose job says so, a unit is a layer-token: one token that was written, in one
layer. A window's quarters are summed over all of the stage's layers and rounded down once, so that
stages are never more than the ring.
"""

from collections.abc import Iterable

import msgspec
from blake3 import blake3

from hypergpu.ids import Digest

PROMPT_TOKENS_PER_UNIT = 4
_TOKEN_BYTES = 8


class TokenCount(msgspec.Struct, frozen=True, array_like=True):
    """Tokens of answers that were passed on to their callers."""

    prompt_tokens: int = 0
    """Tokens that were read: those of prompts, and those of answers that another replica began."""
    new_tokens: int = 0
    """Tokens that were written."""
    answers: int = 0
    """Answers, or parts of them, that they belong to."""
    layers: int = 0
    """Layers that each token went through, where units are layer-tokens; 0: they are tokens."""

    @property
    def units(self) -> int:
        """Whole units of the job."""
        if self.layers:
            quarters = self.new_tokens * PROMPT_TOKENS_PER_UNIT + self.prompt_tokens
            return quarters * self.layers // PROMPT_TOKENS_PER_UNIT
        return self.new_tokens - -self.prompt_tokens // PROMPT_TOKENS_PER_UNIT

    def plus(self, other: "TokenCount") -> "TokenCount":
        """Both together, of the same layers."""
        return TokenCount(
            self.prompt_tokens + other.prompt_tokens,
            self.new_tokens + other.new_tokens,
            self.answers + other.answers,
            self.layers,
        )


def first_link(salt: bytes) -> bytes:
    """The beginning of a window's chain. The salt keeps short texts from being guessed."""
    return blake3(b"answers" + salt).digest()


def next_link(link: bytes, call: bytes, tokens: Iterable[int]) -> bytes:
    """The chain with one more answer: who has its texts and the salt can compute it again.

    Args:
        link: The chain so far.
        call: The packed call, as it went to the replica.
        tokens: Tokens of the answer that the replica wrote in this window.
    """
    packed_tokens = b"".join(token.to_bytes(_TOKEN_BYTES, "little") for token in tokens)
    return blake3(link + blake3(call).digest() + blake3(packed_tokens).digest()).digest()


def chain_digest(link: bytes) -> Digest:
    """The end of a chain as a digest."""
    return Digest(link.hex())

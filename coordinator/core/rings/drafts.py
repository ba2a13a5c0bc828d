"""Drafts of the next tokens by prompt lookup, and how long they should be.

What the last tokens were followed by before is guessed to follow again. A guess costs nothing, so
that it is scored against every token that comes, drafted or not; the share that was right decides
how many tokens are drafted.

References:
    Leviathan et al. 2023, arXiv:2211.17192 (expected tokens of a draft); prompt lookup after Saxena
    2023 (github.com/apoorvumang/prompt-lookup-decoding).
"""

from array import array
from collections.abc import Sequence

import msgspec

DRAFT_MOST = 16
"""Tokens of a draft at most."""
_NEEDLES = (3, 2, 1)
"""How many of the last tokens are looked for, the most first."""
_GUESSES_KEPT = 32
_TOKEN_BYTES = 4


class DraftRecord(msgspec.Struct, frozen=True):
    """Which of a session's newest guesses were right, the newest last."""

    hits: tuple[bool, ...] = ()

    def with_guesses(self, guesses: Sequence[int], tokens: Sequence[int]) -> "DraftRecord":
        """The record with guesses up to the first wrong one, beside what came."""
        hits = list(self.hits)
        for guess, token in zip(guesses, tokens, strict=False):
            hits.append(guess == token)
            if guess != token:
                break
        return DraftRecord(tuple(hits[-_GUESSES_KEPT:]))

    @property
    def accuracy(self) -> float:
        """Share of guesses that are taken to be right, in (0, 1): one of each is assumed before."""
        return (sum(self.hits) + 1) / (len(self.hits) + 2)


def prompt_lookup(tokens: Sequence[int], most: int) -> tuple[int, ...]:
    """Tokens that followed where the last ones of a text stood before, the newest place first."""
    if most <= 0:
        return ()
    octets = array("I", tokens).tobytes()
    for size in _NEEDLES:
        place = _earlier_place(octets, size)
        if place >= 0:
            return tuple(tokens[place + size : place + size + most])
    return ()


def _earlier_place(octets: bytes, size: int) -> int:
    """Index of the newest earlier place of the last tokens; -1: there is none."""
    width = size * _TOKEN_BYTES
    if len(octets) <= width:
        return -1
    needle, end = octets[-width:], len(octets) - _TOKEN_BYTES
    while (found_byte := octets.rfind(needle, 0, end)) >= 0:
        if found_byte % _TOKEN_BYTES == 0:
            return found_byte // _TOKEN_BYTES
        end = found_byte + width - 1
    return -1


class DraftCosts(msgspec.Struct, frozen=True):
    """What passes through a ring cost, in microseconds."""

    pass_us: float
    """Time of all stages together, beside their tokens."""
    token_us: float
    """Time of all stages together, for each token."""
    hops_us: float
    """Time of the way around the ring."""
    slowest_pass_us: float
    """Time of the slowest stage, beside its tokens."""
    slowest_token_us: float

    def ring_us(self, tokens: int) -> float:
        """Time of a pass of so many tokens around the ring."""
        return self.pass_us + self.token_us * tokens + self.hops_us

    def load_us(self, tokens: int, passes: int) -> float:
        """Time in which the slowest stage computes so many tokens in so many passes."""
        return self.slowest_token_us * tokens + self.slowest_pass_us * passes


def draft_length(costs: DraftCosts, accuracy: float, sessions: int, passes: int) -> int:
    """How many tokens to draft: those that give most tokens for the time of a pass.

    Args:
        costs: Of the ring.
        accuracy: Share of guesses that are right, in (0, 1).
        sessions: Sessions that share the ring, 1 at least.
        passes: Passes that they take together.
    """

    def tokens_per_us(length: int) -> float:
        expected_tokens = (1 - accuracy ** (length + 1)) / (1 - accuracy)
        tokens = 1 + length
        return expected_tokens / max(
            costs.ring_us(tokens), costs.load_us(sessions * tokens, passes)
        )

    return max(range(DRAFT_MOST + 1), key=tokens_per_us)

"""Whether lines of a ring's nodes carry its training: tokens a second that stages compute beside
those that their uplinks take.

A stage sends activations forward and gradients back for each token; the first sends no gradients,
and the last no activations.
"""

from collections.abc import Sequence
from typing import NamedTuple

from hypergpu.tensors.hidden_states import state_codec
from hypergpu.units import several

FORWARD_PASSES = 3.0
"""Time of a token's training over that of a forward pass: forward, forward again for the gradients,
and gradients, which take as long as one while the base gets none.
"""
LINE_SHARE_LEAST = 0.25
"""Share of what stages compute that lines carry at least: below it nodes wait for their lines three
quarters of the time, and a ring is refused.
"""


class StageLine(NamedTuple):
    """A stage as a forecast sees it."""

    node: str
    token_us: float
    """Time of a token's forward pass."""
    up_bits_per_s: float
    """What its line sends; 0: not known."""


class TrainingForecast(NamedTuple):
    """What a ring trains."""

    compute_tokens_per_s: float
    """What the slowest stage computes."""
    line_tokens_per_s: float
    """What the slowest line carries; infinite: no line is known."""
    slowest_node: str
    """Node of that line; empty: none is known."""
    token_bytes: tuple[int, ...]
    """What each stage sends of a token."""

    @property
    def tokens_per_s(self) -> float:
        """The lower of both."""
        return min(self.compute_tokens_per_s, self.line_tokens_per_s)

    @property
    def refusal(self) -> str:
        """Why the ring should not begin, with the figure; empty: its lines carry it."""
        if self.line_tokens_per_s >= LINE_SHARE_LEAST * self.compute_tokens_per_s:
            return ""
        needed_bits = 8 * max(self.token_bytes) * LINE_SHARE_LEAST * self.compute_tokens_per_s
        return (
            f"the lines do not carry it: {self.slowest_node} can send"
            f" {self.line_tokens_per_s:,.0f} tokens/s of {max(self.token_bytes):,} bytes each, and"
            f" the stages compute {self.compute_tokens_per_s:,.0f}; {needed_bits / 1e6:,.1f} Mbit/s"
            " up would do. Fix: use nodes with faster lines, fewer stages, or the codec int8o;"
            " or state any_line = true under [stages]"
        )

    @property
    def summary(self) -> str:
        """The figures for people."""
        line_text = (
            f"lines carry {self.line_tokens_per_s:,.0f}"
            if self.slowest_node
            else "no line is measured"
        )
        return (
            f"{several(len(self.token_bytes), 'stage')} compute {self.compute_tokens_per_s:,.0f}"
            f" tokens/s, {line_text}"
        )


def sent_token_bytes(stages: int, width: int, codec: str, gradient_codec: str) -> tuple[int, ...]:
    """Bytes that each stage sends of a token.

    Args:
        stages: How many there are.
        width: Of hidden states.
        codec: Of activations.
        gradient_codec: Of gradients.
    """
    forward = state_codec(codec).row_bytes(width)
    backward = state_codec(gradient_codec).row_bytes(width)
    return tuple(
        (forward if stage < stages - 1 else 0) + (backward if stage else 0)
        for stage in range(stages)
    )


def training_forecast(lines: Sequence[StageLine], token_bytes: Sequence[int]) -> TrainingForecast:
    """What a ring of such stages trains.

    Args:
        lines: Of its stages, in order.
        token_bytes: What each sends of a token.
    """
    slowest_us = max(FORWARD_PASSES * each.token_us for each in lines)
    line_rates = [
        (each.up_bits_per_s / 8 / size, each.node)
        for each, size in zip(lines, token_bytes, strict=True)
        if each.up_bits_per_s and size
    ]
    line_rate, node = min(line_rates, default=(float("inf"), ""))
    return TrainingForecast(1e6 / max(slowest_us, 1e-3), line_rate, node, tuple(token_bytes))

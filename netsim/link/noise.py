"""Seeded noise with memory, as a function of the step alone: whoever asks when hears the same."""

import math
import random

CORRELATION_MOST = 0.95
_FORGOTTEN = 1e-6  # What is left of a value after a block, so that a block needs only the last one.
_BLOCK_LEAST = 16
_BLOCKS_KEPT = 3


class CorrelatedNoise:
    """Standard normal numbers, one a step, each correlated with the one before (AR(1)).

    Any step may be asked for, in any order; going forward costs a microsecond a step, a leap two
    blocks of them.

    Args:
        key: Seeds the noise; equal keys give equal numbers.
        correlation: Between neighbours, in [0, `CORRELATION_MOST`].
    """

    def __init__(self, key: str, correlation: float) -> None:
        self._key = key
        self._correlation = correlation
        self._fresh = math.sqrt(1 - correlation * correlation)
        self._steps = _BLOCK_LEAST
        if correlation > 0:
            self._steps = max(_BLOCK_LEAST, math.ceil(math.log(_FORGOTTEN) / math.log(correlation)))
        self._blocks: dict[int, list[float]] = {}
        self._rolls: dict[int, list[float]] = {}

    def at(self, step: int) -> float:
        """The number of a step."""
        number = step // self._steps
        block = self._blocks.get(number)
        if block is None:
            block = _remember(self._blocks, number, self._values(number))
        return block[step % self._steps]

    def _values(self, number: int) -> list[float]:
        rolls = [*self._rolls_of(number - 1), *self._rolls_of(number)]
        values = [rolls[0]]
        for roll in rolls[1:]:
            values.append(self._correlation * values[-1] + self._fresh * roll)
        return values[self._steps :]

    def _rolls_of(self, number: int) -> list[float]:
        if number in self._rolls:
            return self._rolls[number]
        dice = random.Random(f"{self._key}/{number}")
        return _remember(self._rolls, number, [dice.gauss(0.0, 1.0) for _ in range(self._steps)])


def _remember(blocks: dict[int, list[float]], number: int, block: list[float]) -> list[float]:
    """Put a block beside the few that came last: who looks back does so over one border."""
    if len(blocks) == _BLOCKS_KEPT:
        del blocks[next(iter(blocks))]
    blocks[number] = block
    return block

"""Seeded noise with memory, as a function of the step alone: whoever asks when hears the same."""

import math
import random

CORRELATION_MOST = 0.95
_FORGOTTEN = 1e-6  # What is left of a value after a block, so that a block needs only the last one.
_BLOCK_LEAST = 16


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
        self._number = -1
        self._block: list[float] = []
        self._dice: dict[int, list[float]] = {}

    def at(self, step: int) -> float:
        """The number of a step."""
        number = step // self._steps
        if number != self._number:
            self._block = self._values(number)
            self._number = number
        return self._block[step % self._steps]

    def _values(self, number: int) -> list[float]:
        self._dice = {near: self._rolled(near) for near in (number - 1, number)}
        value = self._dice[number - 1][0]
        values = [value]
        for roll in [*self._dice[number - 1][1:], *self._dice[number]]:
            value = self._correlation * value + self._fresh * roll
            values.append(value)
        return values[self._steps :]

    def _rolled(self, number: int) -> list[float]:
        if number in self._dice:
            return self._dice[number]
        dice = random.Random(f"{self._key}/{number}")
        return [dice.gauss(0.0, 1.0) for _ in range(self._steps)]

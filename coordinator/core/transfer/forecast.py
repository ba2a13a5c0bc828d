"""How long a transfer will take, as a distribution: for plans, and for worlds of many nodes."""

from functools import lru_cache
from math import log

import msgspec

from coordinator.core.transfer.draw import CarriedWindow, ConnectionStart, draw_transfer
from coordinator.core.transfer.path import NetworkPath
from coordinator.core.transfer.window import Dice
from hypergpu.units import Bytes, Microseconds

_DRAWS = 15
_KEPT = 1 << 16
_STEP = 1.03


class TransferForecast(msgspec.Struct, frozen=True):
    """Times of one transfer, the shortest first, each as likely as the others."""

    times_us: tuple[Microseconds, ...]
    left: tuple[CarriedWindow, ...]
    """What each leaves to the next transfer over the connection."""

    @property
    def median_us(self) -> Microseconds:
        """Half of the transfers are faster."""
        return self.times_us[len(self.times_us) // 2]

    @property
    def spread(self) -> float:
        """Half the width of the middle two thirds, over the median: one sigma of a normal one."""
        low, high = len(self.times_us) // 6, len(self.times_us) - 1 - len(self.times_us) // 6
        return (self.times_us[high] - self.times_us[low]) / 2 / max(1, self.median_us)

    def sample_left(self, chance: float) -> CarriedWindow:
        """What a transfer leaves that takes `sample_us`."""
        return self.left[min(int(chance * len(self.left)), len(self.left) - 1)]

    def sample_us(self, chance: float) -> Microseconds:
        """The time that this share of transfers stays under, between the known ones."""
        place = chance * (len(self.times_us) - 1)
        below = int(place)
        if below + 1 >= len(self.times_us):
            return self.times_us[-1]
        low, high = self.times_us[below], self.times_us[below + 1]
        return Microseconds(round(low + (high - low) * (place - below)))


@lru_cache(maxsize=_KEPT)
def forecast_transfer(
    path: NetworkPath,
    size_bytes: Bytes,
    start: ConnectionStart = ConnectionStart.IDLE,
    carried: CarriedWindow | None = None,
) -> TransferForecast:
    """The distribution of a transfer's time.

    A microsecond once it is known; fifteen draws, or one on a path without losses, when it is new.
    For the arguments see `drawn`.
    """
    draws = sorted(
        draw_transfer(path, size_bytes, _sequence(seed), start=start, carried=carried)
        for seed in range(_DRAWS if path.events_per_packet else 1)
    )
    return TransferForecast(
        tuple(draw.took_us for draw in draws), tuple(draw.left for draw in draws)
    )


def round_path(path: NetworkPath) -> NetworkPath:
    """The path with its numbers in steps of 3 %, so that links which wander share forecasts."""
    return msgspec.structs.replace(
        path,
        rtt_us=Microseconds(_near(path.rtt_us)),
        bits_per_s=_near(path.bits_per_s),
        loss=_near(round(path.loss * 1_000_000)) / 1_000_000,
    )


def _near(number: int) -> int:
    if number <= 0:
        return 0
    return round(_STEP ** round(log(number) / log(_STEP)))


def _sequence(seed: int) -> Dice:
    """Numbers in [0, 1) that look random and are the same each time (Knuth's MMIX generator)."""
    state = (seed + 1) * 0x9E3779B97F4A7C15

    def following() -> float:
        nonlocal state
        state = (state * 6364136223846793005 + 1442695040888963407) % (1 << 64)
        return (state >> 11) / (1 << 53)

    return following

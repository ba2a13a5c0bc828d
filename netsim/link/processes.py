"""The seeded random processes that vary a link: rate, delay and loss, each a function of the step.

Whoever asks when hears the same. When a link is worse for a spell is in ``course``.

Theory of operation: delay. Independent jitter a packet either reorders or, where order is kept,
turns into added mean delay. Here the delay is a line through points a quarter of the jitter's
memory apart. It falls more slowly than time passes, so that a later packet never arrives earlier.
That costs nothing while the jitter is below an eighth of its memory; at a quarter it adds a tenth
of the delay.

Theory of operation: loss, a Gilbert-Elliott chain that a pause does not freeze. It is in a good
state, in which packets arrive, or in a bad one, in which they are lost. From a mean loss L and a
mean burst of B packets follow the probabilities of leaving the bad state, r = 1/B, and the good
one, p = r L / (1 - L), a packet each. Burst lengths are counted in packets while packets follow
each other within `PAUSE_US`. In a longer pause the chain runs on in time, one step each `STEP_US`,
as if a stream of 12 Mbit/s passed: a chain that only packets drive would keep a sender that backs
off in the very burst that silenced it. How long it stays in a state is drawn in shuffled strata:
each stay has its geometric distribution, and every `STRATA` stays together have nearly its mean.
Independent draws would miss a loss of 5 % in bursts of 4 by 0.4 points over 20,000 packets (one
standard deviation).

References:
    Gilbert 1960; Elliott 1963; Hasslinger and Hohlfeld 2008, "The Gilbert-Elliott model for packet
    loss in real time services on the Internet".
"""

import math
import random
from typing import Annotated, NamedTuple

import msgspec

from hypergpu.units import Milliseconds
from netsim.link.link import LinkDirection

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


NEVER_US = 1 << 62
HOUR_US = 3_600_000_000
EVENING_HOURS = (18, 23)
_DAY_US = 24 * HOUR_US


_Factor = Annotated[float, msgspec.Meta(ge=0, le=1000)]


class RateShape(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Factors on a rate, as a world file gives them. The default leaves it constant."""

    every_ms: Annotated[Milliseconds, msgspec.Meta(ge=1)] = msgspec.field(
        default=Milliseconds(1000), name="every"
    )
    """How long each drawn or listed factor holds."""
    variation: Annotated[float, msgspec.Meta(ge=0, le=10)] = 0.0
    """Standard deviation over mean of a lognormal factor with mean 1; 0: none is drawn."""
    correlation: Annotated[float, msgspec.Meta(ge=0, le=CORRELATION_MOST)] = 0.0
    """Correlation of that factor with the next one."""
    factors: tuple[_Factor, ...] = ()
    """Fixed factors, one after the other, then from the start again. 0 is a gap."""
    evening: _Factor = 1.0
    """Factor from 18 to 23 o'clock."""

    @property
    def changes_by_step(self) -> bool:
        """Whether every ``every_ms`` brings another factor."""
        return self.variation > 0 or len(self.factors) > 1


class RateProcess:
    """One direction's rate over time. Equal keys give equal rates.

    Args:
        shape: The rate's variation.
        bits_per_s: Its mean, before ``factors`` and ``evening``; 0 (no limit) stays 0.
        key: Seeds the drawn factors.
        starts_at_hour: Local time at the beginning of the world.
    """

    def __init__(
        self, shape: RateShape, bits_per_s: int, *, key: str, starts_at_hour: float = 12.0
    ) -> None:
        self._shape = shape
        self._bits_per_s = bits_per_s
        self._every_us = shape.every_ms * 1000
        self._starts_at_us = round(starts_at_hour * HOUR_US)
        variance = math.log1p(shape.variation**2)
        # The noise is correlated such that its exponential has the correlation asked for.
        of_noise = math.log1p(shape.correlation * shape.variation**2) / variance if variance else 0
        self._sigma = math.sqrt(variance)
        self._noise = CorrelatedNoise(key, of_noise)

    def factor_at(self, now_us: int) -> float:
        """What the rate is multiplied by."""
        step = now_us // self._every_us
        shape = self._shape
        factor = shape.factors[step % len(shape.factors)] if shape.factors else 1.0
        if self._sigma:
            factor *= math.exp(self._sigma * self._noise.at(step) - self._sigma**2 / 2)
        return factor * shape.evening if self._is_evening(now_us) else factor

    def next_change_us(self, now_us: int) -> int:
        """The first moment after ``now_us`` at which the rate may be another."""
        soonest = NEVER_US
        if self._bits_per_s and self._shape.changes_by_step:
            soonest = (now_us // self._every_us + 1) * self._every_us
        if self._bits_per_s and self._shape.evening != 1:
            soonest = min(soonest, self._next_evening_us(now_us))
        return soonest

    def _is_evening(self, now_us: int) -> bool:
        begins, ends = EVENING_HOURS
        return begins * HOUR_US <= (self._starts_at_us + now_us) % _DAY_US < ends * HOUR_US

    def _next_evening_us(self, now_us: int) -> int:
        since_midnight_us = (self._starts_at_us + now_us) % _DAY_US
        return now_us + min(
            (hour * HOUR_US - since_midnight_us - 1) % _DAY_US + 1 for hour in EVENING_HOURS
        )


_POINTS_A_MEMORY = 4
_STEEPEST = 63 / 64  # Below 1, so that whole microseconds keep the order too.
_LOOK_BACK = 8  # Points whose slope may reach the present one; see `_point`.
_CORRELATION = math.exp(-1 / _POINTS_A_MEMORY)
# A line between two points varies less than its ends: 2 t (1 - t) averages 1/3.
_SPREAD = 1 / math.sqrt(1 - (1 - _CORRELATION) / 3)


class WanderingDelay:
    """A direction's delay as a function of time. Equal keys give equal delays.

    While the jitter is at most the delay, the delay is lognormal with exactly this mean and spread:
    skewed to the late side as measured delays are. A clamped jitter above the delay is a normal
    one cut off at zero.
    """

    def __init__(self, direction: LinkDirection, *, key: str) -> None:
        self._delay_us = direction.delay_us
        self._jitter_us = direction.jitter_us * _SPREAD
        self._apart_us = max(1, direction.jitter_memory_ms * 1000 // _POINTS_A_MEMORY)
        self._noise = CorrelatedNoise(key, _CORRELATION)
        self._from_us = 0
        self._until_us = 0
        self._first_us = 0.0
        self._slope = 0.0
        self._sigma = 0.0
        if direction.jitter_us <= direction.delay_us and direction.delay_us:
            self._sigma = math.sqrt(math.log1p((self._jitter_us / direction.delay_us) ** 2))

    def at(self, now_us: int) -> int:
        """Microseconds that a packet takes which leaves the bottleneck now."""
        if not self._jitter_us:
            return self._delay_us
        if not self._from_us <= now_us < self._until_us:
            self._move(now_us // self._apart_us)
        return int(self._first_us + self._slope * (now_us - self._from_us))

    def _move(self, step: int) -> None:
        self._from_us = step * self._apart_us
        self._until_us = self._from_us + self._apart_us
        self._first_us = self._point(step)
        self._slope = (self._point(step + 1) - self._first_us) / self._apart_us

    def _point(self, step: int) -> float:
        """The delay at a point, raised to where the steepest fall from earlier points ends."""
        fall_us: float = self._apart_us * _STEEPEST
        return max(self._draw(step - back) - back * fall_us for back in range(_LOOK_BACK))

    def _draw(self, step: int) -> float:
        noise = self._noise.at(step)
        if self._sigma:
            return self._delay_us * math.exp(self._sigma * noise - self._sigma**2 / 2)
        return max(self._delay_us + self._jitter_us * noise, 0.0)


PAUSE_US = 20_000
STEP_US = 1_000
STRATA = 16
_FOREVER = 1 << 62


class Transitions(NamedTuple):
    """Probabilities of the chain, a packet each."""

    p: float
    """From good to bad."""
    r: float
    """From bad to good."""


def transitions(loss: float, burst_packets: float) -> Transitions:
    """Return the chain's probabilities for the loss and the mean burst of a `LinkDirection`."""
    r = 1 / burst_packets
    return Transitions(p=r * loss / (1 - loss), r=r)


def loss_events_per_packet(loss: float, burst_packets: float) -> float:
    """How often a burst begins, a packet. Congestion control answers to these, not to losses."""
    return loss / burst_packets


class LossChain:
    """Says of packet after packet whether it is lost. Equal dice give equal losses."""

    __slots__ = ("_dice", "_is_bad", "_last_us", "_left", "_loss", "_p", "_r", "_strata")

    def __init__(self, loss: float, burst_packets: float, *, dice: random.Random) -> None:
        self._dice = dice
        self._last_us = 0
        self._strata: tuple[list[int], list[int]] = ([], [])
        self._is_bad = dice.random() < loss
        self.change(loss, burst_packets)

    def change(self, loss: float, burst_packets: float) -> None:
        """Go on with another loss; the state is kept."""
        self._p, self._r = transitions(loss, burst_packets)
        self._loss = loss
        self._is_bad = self._is_bad and loss > 0
        self._left = self._stay()

    def is_lost(self, now_us: int) -> bool:
        """Whether the packet that passes now is lost. Call it once a packet, in order."""
        pause_us = now_us - self._last_us - PAUSE_US
        self._last_us = now_us
        if pause_us > 0:
            self._run_on(pause_us)
        if not self._left:
            self._is_bad = not self._is_bad
            self._left = self._stay()
        self._left -= 1
        return self._is_bad

    def _run_on(self, pause_us: int) -> None:
        memory = 1 - self._p - self._r
        # A chain may swing (B = 1 with a high loss): after whole steps only its size counts.
        kept_share = abs(memory) ** (pause_us / STEP_US)
        self._is_bad = self._dice.random() < self._loss + (self._is_bad - self._loss) * kept_share
        self._left = self._stay()

    def _stay(self) -> int:
        """How many packets the present state lasts, this one included."""
        leave_chance = self._r if self._is_bad else self._p
        if leave_chance <= 0:
            return _FOREVER
        if leave_chance >= 1:
            return 1
        strata = self._strata[self._is_bad]
        if not strata:
            strata.extend(range(STRATA))
            self._dice.shuffle(strata)
        chance = (strata.pop() + self._dice.random()) / STRATA
        return 1 + int(math.log1p(-chance) / math.log1p(-leave_chance))

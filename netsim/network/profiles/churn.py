"""How long machines stay and how long they are away: seeded, pure, in microseconds."""

import math
import random
from collections.abc import Iterator
from enum import StrEnum
from typing import NamedTuple

import msgspec

from netsim.error import NetsimError


class SpanKind(StrEnum):
    """Of a distribution of lengths of time."""

    EXPONENTIAL = "exponential"
    WEIBULL = "weibull"
    LOGNORMAL = "lognormal"
    GAMMA = "gamma"
    HYPEREXPONENTIAL = "hyperexponential"


class Phase(msgspec.Struct, frozen=True):
    """One of the exponential distributions that a hyper-exponential one mixes."""

    share: float
    mean_s: float


class Span(msgspec.Struct, frozen=True, kw_only=True):
    """A distribution of lengths of time.

    Raises:
        NetsimError: There is no such distribution.
    """

    kind: SpanKind
    scale_s: float = 0.0
    """The mean of an exponential, the median of a lognormal, else what textbooks call scale."""
    shape: float = 1.0
    """Of Weibull and gamma; of a lognormal the deviation of its logarithm."""
    phases: tuple[Phase, ...] = ()
    """Of a hyper-exponential; their shares count relative to their sum."""

    def __post_init__(self) -> None:
        is_mixed = self.kind is SpanKind.HYPEREXPONENTIAL
        numbers = [number for each in self.phases for number in (each.share, each.mean_s)]
        if not is_mixed:
            numbers = [self.scale_s, self.shape]
        if is_mixed != bool(self.phases):
            fix = "give phases to a hyperexponential, and scale and shape to the others"
            raise NetsimError(f"a {self.kind} span with {len(self.phases)} phases", fix)
        if not all(0 < number < 1e9 for number in numbers):
            what = f"a {self.kind} span of {', '.join(f'{number:g}' for number in numbers)}"
            raise NetsimError(what, "give numbers above 0 and below 1e9")

    def drawn_us(self, dice: random.Random) -> int:
        """A length of time, a microsecond at least."""
        return max(1, round(self._drawn_s(dice) * 1e6))

    @property
    def mean_s(self) -> float:
        """The mean length."""
        match self.kind:
            case SpanKind.EXPONENTIAL:
                return self.scale_s
            case SpanKind.WEIBULL:
                return self.scale_s * math.gamma(1 + 1 / self.shape)
            case SpanKind.LOGNORMAL:
                return self.scale_s * math.exp(self.shape**2 / 2)
            case SpanKind.GAMMA:
                return self.scale_s * self.shape
            case SpanKind.HYPEREXPONENTIAL:
                total = sum(phase.share for phase in self.phases)
                return sum(phase.share * phase.mean_s for phase in self.phases) / total

    def _drawn_s(self, dice: random.Random) -> float:
        match self.kind:
            case SpanKind.EXPONENTIAL:
                return dice.expovariate(1 / self.scale_s)
            case SpanKind.WEIBULL:
                return dice.weibullvariate(self.scale_s, self.shape)
            case SpanKind.LOGNORMAL:
                return dice.lognormvariate(math.log(self.scale_s), self.shape)
            case SpanKind.GAMMA:
                return dice.gammavariate(self.shape, self.scale_s)
            case SpanKind.HYPEREXPONENTIAL:
                shares = [phase.share for phase in self.phases]
                (phase,) = dice.choices(self.phases, shares)
                return dice.expovariate(1 / phase.mean_s)


class Churn(msgspec.Struct, frozen=True):
    """Sessions and absences that follow each other."""

    session: Span
    absence: Span

    @property
    def availability(self) -> float:
        """Share of the time that a machine is there."""
        return self.session.mean_s / (self.session.mean_s + self.absence.mean_s)


class Absence(NamedTuple):
    """A node's daemon is killed, and started again with what it had on disk."""

    from_us: int
    until_us: int


def absences(churn: Churn, *, key: str, speed: float = 1.0) -> Iterator[Absence]:
    """A machine's absences in order of time, without end. It is there at 0, at a session's start.

    Args:
        churn: Its lengths of time.
        key: Seeds them; equal keys give equal absences.
        speed: Divides all lengths, so that hours of churn fit into minutes.
    """
    dice = random.Random(key)
    now_us = 0
    while True:
        from_us = now_us + max(1, round(churn.session.drawn_us(dice) / speed))
        now_us = from_us + max(1, round(churn.absence.drawn_us(dice) / speed))
        yield Absence(from_us, now_us)

"""A link over time: its own numbers, what varies by itself, and what a trace says. Pure, seeded."""

import math
import random
from collections.abc import Iterator
from typing import Annotated

import msgspec

from hypergpu.units import Milliseconds
from netsim.link.episodes import Episodes, EpisodeTimes
from netsim.link.link import STALLED_BITS_PER_S, Link, LinkDirection, most_loss
from netsim.link.rate import NEVER_US, RateProcess, RateShape
from netsim.link.trace import LinkTrace, apply_row


class Variation(msgspec.Struct, frozen=True, kw_only=True):
    """Variation of a link by itself. The default is none."""

    rate: RateShape = RateShape()
    """Variation of each direction's rate; each draws its own numbers."""
    episodes: tuple[Episodes, ...] = ()
    """Spells of both directions together."""
    delay_step_ms: Annotated[float, msgspec.Meta(ge=0, le=60_000)] = 0.0
    """At each step the one-way delay is anywhere up to this far from its mean."""
    delay_step_every_ms: Annotated[Milliseconds, msgspec.Meta(ge=1)] = Milliseconds(15_000)


class LinkCourse:
    """One link over time. Equal arguments give equal links.

    Args:
        link: Its numbers where nothing varies them. A trace replaces them, variation comes on top.
        variation: What changes by itself.
        key: Seeds what is drawn: the world's seed and the node's name.
        traces: Recorded changes; a later one wins where both say something.
        starts_at_hour: Local time at the beginning of the world.
    """

    def __init__(
        self,
        link: Link,
        variation: Variation,
        *,
        key: str,
        traces: tuple[LinkTrace, ...] = (),
        starts_at_hour: float = 12.0,
    ) -> None:
        self._link = link
        self._variation = variation
        self._key = key
        self._traces = traces
        self._rates = {
            way: RateProcess(
                variation.rate,
                bits_per_s,
                key=f"{key}/rate-{way}",
                starts_at_hour=starts_at_hour,
            )
            for way, bits_per_s in (("up", link.up.bits_per_s), ("down", link.down.bits_per_s))
        }
        self._episodes = tuple(
            (spells, EpisodeTimes(spells, key=f"{key}/episodes-{number}"))
            for number, spells in enumerate(variation.episodes)
        )

    def at(self, now_us: int) -> Link:
        """The link as it is at a moment."""
        link = self._link
        for trace in self._traces:
            link = apply_row(link, trace.row_at(now_us))
        return msgspec.structs.replace(
            link,
            up=self._direction_at(link.up, "up", now_us),
            down=self._direction_at(link.down, "down", now_us),
        )

    def next_change_us(self, now_us: int) -> int:
        """The first moment after ``now_us`` at which the link may be another; `NEVER_US` if none.

        The wander of jitter is no change of the link.
        """
        soonest = self._rates["up"].next_change_us(now_us)
        for trace in self._traces:
            soonest = min(soonest, trace.next_change_us(now_us))
        for _, times in self._episodes:
            soonest = min(soonest, times.next_change_us(now_us))
        if self._variation.delay_step_ms:
            every_us = self._variation.delay_step_every_ms * 1000
            soonest = min(soonest, (now_us // every_us + 1) * every_us)
        return soonest

    def changes(self, until_us: int) -> Iterator[tuple[int, Link]]:
        """The link at 0 and after each change before ``until_us``, in order of time."""
        now_us, link = 0, self.at(0)
        yield now_us, link
        while (now_us := self.next_change_us(now_us)) < min(until_us, NEVER_US):
            if (replace_row := self.at(now_us)) != link:
                link = replace_row
                yield now_us, link

    def _direction_at(self, direction: LinkDirection, way: str, now_us: int) -> LinkDirection:
        spells = [spells for spells, times in self._episodes if times.is_on(now_us)]
        spells_us = sum(round(each.delay_ms * 1000) for each in spells)
        delay_us = direction.delay_us + self._step_us(now_us) + spells_us
        loss = direction.loss * math.prod(each.loss_factor for each in spells)
        is_stalled = any(each.is_stalled for each in spells)
        return msgspec.structs.replace(
            direction,
            delay_us=max(0, delay_us, 0 if direction.jitter_is_clamped else direction.jitter_us),
            loss=min(loss, most_loss(direction.burst_packets)),
            bits_per_s=STALLED_BITS_PER_S if is_stalled else self._rate(direction, way, now_us),
        )

    def _rate(self, direction: LinkDirection, way: str, now_us: int) -> int:
        if not direction.bits_per_s:
            return 0
        factor = self._rates[way].factor_at(now_us)
        return max(STALLED_BITS_PER_S, round(direction.bits_per_s * factor))

    def _step_us(self, now_us: int) -> int:
        if not self._variation.delay_step_ms:
            return 0
        number = now_us // (self._variation.delay_step_every_ms * 1000)
        dice = random.Random(f"{self._key}/delay-step/{number}")
        most_us = round(self._variation.delay_step_ms * 1000)
        return dice.randint(-most_us, most_us)

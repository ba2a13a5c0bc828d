"""A link over time: its own numbers, what varies by itself, and what a trace says. Pure, seeded."""

import math
import random
from collections.abc import Iterator
from typing import Annotated, Literal, NamedTuple

import msgspec

from hypergpu.units import Microseconds, Milliseconds
from netsim.link.link import (
    STALLED_BITS_PER_S,
    Link,
    LinkDirection,
    LinkTrace,
    apply_row,
    most_loss,
)
from netsim.link.nat import NatKind
from netsim.link.processes import NEVER_US, RateProcess, RateShape


class Episodes(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One spell in each stretch of ``every_ms``, as a world file gives it.

    Raises:
        ValueError: No link can have such spells.
    """

    every_ms: Milliseconds = msgspec.field(name="every")
    least_ms: Milliseconds = msgspec.field(name="least")
    """Shortest spell."""
    most_ms: Milliseconds = msgspec.field(name="most")
    """Longest spell; lengths between the two are equally likely."""
    is_regular: bool = msgspec.field(default=False, name="regular")
    """At the beginning of each stretch, not somewhere in it."""
    is_stalled: bool = msgspec.field(default=False, name="stalled")
    """Nothing passes in a spell; what waits, waits."""
    loss_factor: Annotated[float, msgspec.Meta(ge=0, le=10_000)] = 1.0
    """On the loss, in a spell."""
    delay_ms: Annotated[float, msgspec.Meta(ge=0, le=60_000)] = 0.0
    """Added each way, in a spell."""

    def __post_init__(self) -> None:
        if not 0 < self.least_ms <= self.most_ms < self.every_ms:
            what = f"spells of {self.least_ms} to {self.most_ms} ms in each {self.every_ms} ms"
            raise ValueError(f"{what}\ngive 0 < least <= most < every")


class EpisodeSpell(NamedTuple):
    """From its first moment to the first moment after it."""

    from_us: int
    until_us: int


class EpisodeTimes:
    """When the spells are. Equal keys give equal spells."""

    def __init__(self, episodes: Episodes, *, key: str) -> None:
        self._episodes = episodes
        self._key = key
        self._every_us = episodes.every_ms * 1000
        self._stretch = -1
        self._spell = EpisodeSpell(0, 0)

    def is_on(self, now_us: int) -> bool:
        """Whether a spell is on."""
        spell = self.spell(now_us // self._every_us)
        return spell.from_us <= now_us < spell.until_us

    def next_change_us(self, now_us: int) -> int:
        """When the present or else the next spell ends or begins."""
        stretch = now_us // self._every_us
        spell = self.spell(stretch)
        if now_us < spell.from_us:
            return spell.from_us
        return spell.until_us if now_us < spell.until_us else self.spell(stretch + 1).from_us

    def spell(self, stretch: int) -> EpisodeSpell:
        """The spell of a stretch, counted from 0."""
        if stretch != self._stretch:
            self._stretch = stretch
            self._spell = self._draw(stretch)
        return self._spell

    def _draw(self, stretch: int) -> EpisodeSpell:
        dice = random.Random(f"{self._key}/{stretch}")
        lasting_us = dice.randint(self._episodes.least_ms, self._episodes.most_ms) * 1000
        from_us = stretch * self._every_us
        if not self._episodes.is_regular:
            from_us += dice.randrange(self._every_us - lasting_us)
        return EpisodeSpell(from_us, from_us + lasting_us)


class Variation(msgspec.Struct, frozen=True, kw_only=True):
    """Variation of a link by itself. The default is none."""

    rate: RateShape = RateShape()
    """Variation of each direction's rate; each draws its own numbers."""
    episodes: tuple[Episodes, ...] = ()
    """Spells of both directions together."""
    delay_step_ms: Annotated[float, msgspec.Meta(ge=0, le=60_000)] = 0.0
    """At each step the one-way delay is anywhere up to this far from its mean."""
    delay_step_every_ms: Annotated[Milliseconds, msgspec.Meta(ge=1)] = Milliseconds(15_000)


SHORTEST_QUEUE_BYTES = 2 * 1500
Way = Literal["up", "down"]
_NEAR = LinkDirection(delay_us=Microseconds(0), bits_per_s=100_000_000, queue_ms=Milliseconds(100))
_OPEN = LinkDirection(delay_us=Microseconds(0), bits_per_s=0)
UNLIMITED = Link(up=_OPEN, down=_OPEN)
"""Neither delay nor limit: a coordinator's link where only the node's is of interest."""
COORDINATOR_LINK = Link(up=_NEAR, down=_NEAR)
"""100 Mbit/s, shared by all nodes, unless said: an unlimited one would measure the router."""


class Shape(msgspec.Struct, frozen=True, kw_only=True):
    """A link with what changes it. Times count from when the router heard of it."""

    link: Link
    variation: Variation = Variation()
    traces: tuple[LinkTrace, ...] = ()
    starts_at_hour: float = 12.0
    nat: NatKind | None = None
    """The box between the host and the link; None: the host has a public address. It is there from
    the beginning, and no later shape changes it."""

    @property
    def varies(self) -> bool:
        """Whether the link changes by itself."""
        return bool(self.traces) or self.variation != Variation()

    def room_bytes(self, way: Way) -> int:
        """Return how much may wait before the bottleneck: ``queue_ms`` at its usual rate.

        A device's memory does not shrink with its rate, least of all in a gap.
        """
        direction: LinkDirection = getattr(self.link, way)
        bits_per_s = direction.bits_per_s
        for trace in self.traces:
            bits_per_s = mean_bits_per_s(trace, way) or bits_per_s
        return max(direction.queue_ms * bits_per_s // 8000, SHORTEST_QUEUE_BYTES)


def mean_bits_per_s(trace: LinkTrace, way: Way) -> int:
    """Return the mean over time of the rates that a trace names; 0 when it names none."""
    bits_us = named_us = 0
    ends_us = [row.at_us for row in trace.rows[1:]] + [trace.period_us]
    for row, end_us in zip(trace.rows, ends_us, strict=True):
        rate = row.up_bits_per_s if way == "up" else row.down_bits_per_s
        if rate is not None:
            bits_us += rate * (end_us - row.at_us)
            named_us += end_us - row.at_us
    return bits_us // named_us if named_us else 0


class LinkCourse:
    """One link over time. Equal arguments give equal links.

    A trace replaces the link's own numbers, variation comes on top.

    Args:
        shape: The link, and what varies it; of two traces the later one wins.
        key: Seeds what is drawn: the world's seed and the node's name.
    """

    def __init__(self, shape: Shape, *, key: str) -> None:
        self._link = shape.link
        self._variation = shape.variation
        self._key = key
        self._traces = shape.traces
        self._rates = {
            way: RateProcess(
                shape.variation.rate,
                direction.bits_per_s,
                key=f"{key}/rate-{way}",
                starts_at_hour=shape.starts_at_hour,
            )
            for way, direction in (("up", shape.link.up), ("down", shape.link.down))
        }
        self._episodes = tuple(
            (spells, EpisodeTimes(spells, key=f"{key}/episodes-{number}"))
            for number, spells in enumerate(shape.variation.episodes)
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

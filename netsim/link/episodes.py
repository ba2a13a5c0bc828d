"""Short spells in which a link is worse: gaps, handovers, spikes. Seeded functions of time."""

import random
from typing import Annotated, NamedTuple

import msgspec

from hypergpu.units import Milliseconds


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

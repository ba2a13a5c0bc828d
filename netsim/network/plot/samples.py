"""One node's link, looked at in equal steps of time: what its lane of the picture shows."""

import msgspec

from netsim.link import STALLED_BITS_PER_S, WanderingDelay
from netsim.network.churn import Absence
from netsim.network.course import WorldCourse
from netsim.network.world import Fault, NodeDescription, WorldDescription


class Sample(msgspec.Struct, frozen=True):
    """A link at a moment."""

    at_us: int
    up_bits_per_s: int
    down_bits_per_s: int
    rtt_us: int
    """With jitter, without queues."""
    loss: float
    """The greater of the two ways'."""


class Lane(msgspec.Struct, frozen=True):
    """Everything about one node."""

    node: NodeDescription
    samples: tuple[Sample, ...]
    faults: tuple[Fault, ...]
    absences: tuple[Absence, ...]


def sampled(
    world: WorldDescription, names: tuple[str, ...], until_us: int, count: int
) -> list[Lane]:
    """A lane a name, each with ``count`` samples."""
    course = WorldCourse(world)
    return [
        Lane(
            node=world.node(name),
            samples=_samples(course, world, name, [until_us * i // count for i in range(count)]),
            faults=tuple(each for each in world.faults if each.target == name),
            absences=tuple(course.absences(name, until_us)),
        )
        for name in names
    ]


def _samples(
    course: WorldCourse, world: WorldDescription, name: str, times_us: list[int]
) -> tuple[Sample, ...]:
    link = world.node(name).link
    # Jitter is a deviation around whatever delay the link has: it is drawn once and shifted.
    wander = [
        (WanderingDelay(way, key=world.key(f"jitter-{word}", name)), way.delay_us)
        for word, way in (("up", link.up), ("down", link.down))
    ]
    samples = []
    now, until_us = link, 0
    for now_us in times_us:
        if now_us >= until_us:
            now, until_us = course.state(name, now_us).link, course.next_change_us(name, now_us)
        jitter_us = sum(delay.at(now_us) - mean_us for delay, mean_us in wander)
        samples.append(
            Sample(
                at_us=now_us,
                up_bits_per_s=_shown(now.up.bits_per_s),
                down_bits_per_s=_shown(now.down.bits_per_s),
                rtt_us=max(0, now.rtt_us + jitter_us),
                loss=max(now.up.loss, now.down.loss),
            )
        )
    return tuple(samples)


def _shown(bits_per_s: int) -> int:
    return 0 if bits_per_s == STALLED_BITS_PER_S else bits_per_s

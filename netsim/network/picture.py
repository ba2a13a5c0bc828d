"""Draws a world's links over time as one SVG. Pure: the same world gives the same text."""

import math
from collections.abc import Iterable, Iterator

import msgspec

from hypergpu import svg
from hypergpu.units import several
from netsim.link import NEVER_US, STALLED_BITS_PER_S, NetsimError, WanderingDelay
from netsim.network.timeline import WorldCourse
from netsim.network.world import (
    COORDINATOR,
    Absence,
    ClockJumpFault,
    NodeDescription,
    WorldDescription,
    WorldFault,
)

_LEFT = 176.0
_WIDTH = 860.0
_RIGHT = _LEFT + _WIDTH
_HEIGHT = 118.0
_RATE = 56.0
_DELAY = 36.0
_GAP = 8.0
_STEPS = (1, 1.5, 2, 3, 5, 7, 10)

_FAULT_WORDS = {
    "crash": "crash",
    "partition": "cut off",
    "flap": "flapping",
    "slow_disk": "slow disk",
    "clock_jump": "clock jump",
    "corrupt": "corrupts",
    "lie": "lies",
    "silent": "silent",
    "slow_device": "slow device",
}
LANES_MAX = 40
_SAMPLES = 1200
_TOP = 92.0
_BOTTOM = 52.0
_PAGE = _RIGHT + 84
_STRIP = 34.0
_TICKS_S = (1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1800, 3600, 7200, 21_600, 86_400)

_STYLE = """
text { font: 12px "Helvetica Neue", Arial, "DejaVu Sans", sans-serif; fill: #1f2933 }
.title { font-size: 19px; font-weight: 600 } .name { font-size: 14px; font-weight: 600 }
.quiet, .tick { fill: #5f6c7b } .scale { font-size: 10px; fill: #5f6c7b }
.loss-scale { font-size: 10px; fill: #c0322b }
.word { font-size: 10.5px; font-weight: 600; fill: #7a2e0e;
  paint-order: stroke; stroke: #ffffff; stroke-width: 2.5px }
.page { fill: #ffffff } .ground { fill: #f5f7f9 }
.grid { stroke: #d5dbe1; stroke-width: 1 }
.down { fill: none; stroke: #2468b4; stroke-width: 1.4 } .down-area { fill: #2468b4; opacity: .16 }
.up { fill: none; stroke: #e07b18; stroke-width: 1.6 }
.delay { fill: none; stroke: #3e4c59; stroke-width: 1.1 } .loss { fill: #e0483f; opacity: .45 }
.away { fill: #8795a5; opacity: .45 } .fault { opacity: .3; fill: #e0a100 }
.crash { fill: #4a2a6b } .partition, .flap { fill: #b3261e } .lie, .corrupt { fill: #a8487f }
"""


class LinkSample(msgspec.Struct, frozen=True):
    """A link at a moment."""

    at_us: int
    up_bits_per_s: int
    down_bits_per_s: int
    rtt_us: int
    """With jitter, without queues."""
    loss: float
    """The greater of the two directions' losses."""


class PictureLane(msgspec.Struct, frozen=True):
    """Everything that is drawn of one node."""

    node: NodeDescription
    samples: tuple[LinkSample, ...]
    faults: tuple[WorldFault, ...]
    absences: tuple[Absence, ...]


def world_svg(world: WorldDescription, until_us: int) -> str:
    """Draw the first `LANES_MAX` nodes of a world from its beginning to ``until_us``.

    Raises:
        NetsimError: There is no time to show.
    """
    if until_us <= 0:
        raise NetsimError(f"a picture of {until_us} us", "give a length above 0")
    names = tuple(node.name for node in world.nodes[:LANES_MAX])
    lanes = _sample_lanes(world, names, until_us, _SAMPLES)
    coordinator_faults = [fault for fault in world.faults if fault.target == COORDINATOR]
    first = _TOP + (_STRIP if coordinator_faults else 0)
    height = first + _HEIGHT * len(lanes) + _BOTTOM
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_PAGE:.0f}" height="{height:.0f}">',
        f"<style>{_STYLE}</style>",
        svg.box((0, 0), (_PAGE, height), style="page"),
        *_head(world, len(names)),
        *(
            part
            for n, lane in enumerate(lanes)
            for part in _lane_svg(lane, first + n * _HEIGHT, until_us)
        ),
        *_axis(first, height - _BOTTOM + 2, until_us),
    ]
    if coordinator_faults:
        parts.append(svg.text(14, _TOP + 13, COORDINATOR, style="name"))
        parts.append(svg.box((_LEFT, _TOP), (_WIDTH, 18), style="ground"))
        parts += _fault_boxes(coordinator_faults, _TOP, 18.0, until_us)
        parts += _fault_words(coordinator_faults, _TOP, until_us)
    return "\n".join([*parts, "</svg>", ""])


def _head(world: WorldDescription, shown: int) -> Iterator[str]:
    more = f", the first {shown} shown" if shown < len(world.nodes) else ""
    yield svg.text(14, 32, world.name, style="title")
    hour = f"{int(world.starts_at_hour):02d}:{int(world.starts_at_hour * 60) % 60:02d}"
    subtitle = f"{several(len(world.nodes), 'node')}{more}; begins at {hour}, seed {world.seed}"
    yield svg.text(_RIGHT, 32, subtitle, style="quiet", anchor="end")
    x = 14.0
    for style, words in (
        ("down-area", "rate down"),
        ("up", "rate up"),
        ("delay", "round trip"),
        ("loss", "loss (0.01 to 100 %)"),
        ("away", "away by churn"),
        ("fault crash", "crash"),
        ("fault partition", "cut off"),
        ("fault lie", "lies, corrupts"),
        ("fault", "slow disk, clock"),
    ):
        yield from _legend_mark(style, x, 58)
        yield svg.text(x + 22, 63, words)
        x += 40 + 6.4 * len(words)


def _legend_mark(style: str, x: float, y: float) -> Iterator[str]:
    if style in ("up", "delay"):
        yield svg.line((x, y), (x + 16, y), style=style)
    else:
        yield svg.box((x, y - 6), (16, 12), style=style)
    if style == "down-area":
        yield svg.line((x, y - 6), (x + 16, y - 6), style="down")


def _axis(top: float, bottom: float, until_us: int) -> Iterator[str]:
    until_s = until_us / 1e6
    every_s = next((tick for tick in _TICKS_S if until_s / tick <= 12), _TICKS_S[-1])
    for tick in range(int(until_s / every_s) + 1):
        x = _x_at(tick * every_s * 1_000_000, until_us)
        yield svg.line((x, top - 4), (x, bottom), style="grid")
        yield svg.text(x, bottom + 16, _time_text(tick * every_s), style="tick", anchor="middle")
    middle = _LEFT + _WIDTH / 2
    yield svg.text(middle, bottom + 36, "time since the start", style="quiet", anchor="middle")


def _time_text(seconds: int) -> str:
    if seconds < 120:
        return f"{seconds} s"
    minutes, rest = divmod(seconds, 60)
    if minutes < 120:
        return f"{minutes}:{rest:02d} min" if rest else f"{minutes} min"
    return f"{minutes // 60}:{minutes % 60:02d} h"


def _sample_lanes(
    world: WorldDescription, names: tuple[str, ...], until_us: int, count: int
) -> list[PictureLane]:
    """Return one lane for each name, each with ``count`` samples."""
    course = WorldCourse(world)
    return [
        PictureLane(
            node=world.node(name),
            samples=_samples(course, world, name, [until_us * i // count for i in range(count)]),
            faults=tuple(each for each in world.faults if each.target == name),
            absences=tuple(course.absences(name, until_us)),
        )
        for name in names
    ]


def _samples(
    course: WorldCourse, world: WorldDescription, name: str, times_us: list[int]
) -> tuple[LinkSample, ...]:
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
            LinkSample(
                at_us=now_us,
                up_bits_per_s=_visible_rate(now.up.bits_per_s),
                down_bits_per_s=_visible_rate(now.down.bits_per_s),
                rtt_us=max(0, now.rtt_us + jitter_us),
                loss=max(now.up.loss, now.down.loss),
            )
        )
    return tuple(samples)


def _visible_rate(bits_per_s: int) -> int:
    return 0 if bits_per_s == STALLED_BITS_PER_S else bits_per_s


def _lane_svg(lane: PictureLane, top: float, until_us: int) -> Iterator[str]:
    """Draw a lane with its upper edge at ``top``."""
    yield svg.box((_LEFT, top), (_WIDTH, _RATE), style="ground")
    yield svg.box((_LEFT, top + _RATE + _GAP), (_WIDTH, _DELAY), style="ground")
    yield from _node_names(lane, top)
    yield from _absences(lane, top, until_us)
    yield from _fault_boxes(lane.faults, top, _RATE + _GAP + _DELAY, until_us)
    yield from _rates(lane, top, until_us)
    yield from _delay_and_loss(lane, top + _RATE + _GAP, until_us)
    yield from _fault_words(lane.faults, top, until_us)


def _fault_width(fault: WorldFault, until_us: int) -> float:
    """Return the width of a fault; a clock that jumped for good did so in an instant."""
    if isinstance(fault, ClockJumpFault) and fault.until_us == NEVER_US:
        return 3.0
    return max(3.0, _x_at(fault.until_us, until_us) - _x_at(fault.at_us, until_us))


def _x_at(at_us: int, until_us: int) -> float:
    """Return where a moment lies."""
    return _LEFT + _WIDTH * min(at_us, until_us) / until_us


def _node_names(lane: PictureLane, top: float) -> Iterator[str]:
    node = lane.node
    yield svg.text(14, top + 16, node.name, style="name")
    yield svg.text(14, top + 33, node.profile or "own link", style="quiet")
    if node.step_floor_ms:
        yield svg.text(14, top + 49, f"step {node.step_floor_ms:g} ms", style="quiet")


def _rates(lane: PictureLane, top: float, until_us: int) -> Iterator[str]:
    peak = max(max(each.up_bits_per_s, each.down_bits_per_s) for each in lane.samples)
    if not peak:
        yield svg.text(_LEFT + 8, top + 16, "no limit on the rate", style="quiet")
        return
    most = _scale_end(peak / 1e6) * 1e6
    floor = top + _RATE
    for style, name in (("down", "down_bits_per_s"), ("up", "up_bits_per_s")):
        points = [
            (_x_at(each.at_us, until_us), floor - _RATE * getattr(each, name) / most)
            for each in lane.samples
        ]
        if style == "down":
            yield svg.steps(points, _RIGHT, style="down-area", floor=floor)
        yield svg.steps(points, _RIGHT, style=style)
    yield svg.text(_LEFT - 8, top + 9, f"{most / 1e6:g}", style="scale", anchor="end")
    yield svg.text(_LEFT - 8, top + _RATE / 2 + 4, "Mbit/s", style="scale", anchor="end")
    yield svg.text(_LEFT - 8, floor, "0", style="scale", anchor="end")


def _delay_and_loss(lane: PictureLane, top: float, until_us: int) -> Iterator[str]:
    floor = top + _DELAY
    most_ms = _scale_end(max(each.rtt_us for each in lane.samples) / 1000 or 1)
    losses = [
        (_x_at(each.at_us, until_us), floor - _DELAY * _loss_height(each.loss))
        for each in lane.samples
    ]
    yield svg.steps(losses, _RIGHT, style="loss", floor=floor)
    least, most = (100 * pick(each.loss for each in lane.samples) for pick in (min, max))
    loss_text = f"{least:.2g} %" if least == most else f"{least:.2g} to {most:.2g} %"
    yield svg.text(_RIGHT + 8, floor, loss_text if most else "no loss", style="loss-scale")
    delays = [
        (_x_at(each.at_us, until_us), floor - _DELAY * each.rtt_us / 1000 / most_ms)
        for each in lane.samples
    ]
    yield svg.curve([*delays, (_RIGHT, delays[-1][1])], style="delay")
    yield svg.text(_LEFT - 8, top + 9, f"{most_ms:g} ms", style="scale", anchor="end")
    yield svg.text(_LEFT - 8, floor, "0", style="scale", anchor="end")


def _absences(lane: PictureLane, top: float, until_us: int) -> Iterator[str]:
    for absence in lane.absences:
        left_x, right_x = _x_at(absence.from_us, until_us), _x_at(absence.until_us, until_us)
        size = (max(1.0, right_x - left_x), _RATE + _GAP + _DELAY)
        yield svg.box((left_x, top), size, style="away", title="away by churn")


def _fault_boxes(
    faults: Iterable[WorldFault], top: float, height: float, until_us: int
) -> Iterator[str]:
    for fault in faults:
        if fault.at_us < until_us:
            corner = (_x_at(fault.at_us, until_us), top)
            size = (_fault_width(fault, until_us), height)
            style = f"fault {fault.kind}"
            yield svg.box(corner, size, style=style, title=_FAULT_WORDS[fault.kind])


def _fault_words(faults: Iterable[WorldFault], top: float, until_us: int) -> Iterator[str]:
    y, free = top, 0.0
    for fault in faults:
        if fault.at_us < until_us:
            x = _x_at(fault.at_us, until_us) + 4
            y = y + 13 if x < free else top + 13
            free = x + 70
            yield svg.text(x, y, _FAULT_WORDS[fault.kind], style="word")


def _loss_height(loss: float) -> float:
    """Return a height from 0.01 % at the bottom to 100 %: profiles differ by powers of ten."""
    return min(1.0, max(0.0, 1 + math.log10(max(loss, 1e-9)) / 4))


def _scale_end(number: float) -> float:
    """Return the next of 1, 1.5, 2, 3, 5, 7, 10, 15, ..., at which a scale may end."""
    if number <= 0:
        return 0
    power = 10.0 ** math.floor(math.log10(number))
    return next(round(step * power, 9) for step in _STEPS if step * power >= number * 0.999)

"""A world's links over time as one SVG. Pure: the same world gives the same text."""

from collections.abc import Iterator

from hypergpu import svg
from hypergpu.units import several
from netsim.error import NetsimError
from netsim.network.plot.lane import (
    FAULT_WORDS,
    HEIGHT,
    LEFT,
    RIGHT,
    WIDTH,
    fault_width,
    lane_svg,
    x_at,
)
from netsim.network.plot.samples import sampled
from netsim.network.world import COORDINATOR, WorldDescription

LANES_MAX = 40
_SAMPLES = 1200
_TOP = 92.0
_BOTTOM = 52.0
_PAGE = RIGHT + 84
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


def world_svg(world: WorldDescription, until_us: int) -> str:
    """The first `LANES_MAX` nodes of a world from its beginning to ``until_us``.

    Raises:
        NetsimError: There is no time to show.
    """
    if until_us <= 0:
        raise NetsimError(f"a picture of {until_us} us", "give a length above 0")
    names = tuple(node.name for node in world.nodes[:LANES_MAX])
    lanes = sampled(world, names, until_us, _SAMPLES)
    strips = [fault for fault in world.faults if fault.target == COORDINATOR]
    first = _TOP + (_STRIP if strips else 0)
    height = first + HEIGHT * len(lanes) + _BOTTOM
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_PAGE:.0f}" height="{height:.0f}">',
        f"<style>{_STYLE}</style>",
        svg.box((0, 0), (_PAGE, height), style="page"),
        *_head(world, len(names)),
        *(
            part
            for n, lane in enumerate(lanes)
            for part in lane_svg(lane, first + n * HEIGHT, until_us)
        ),
        *_axis(first, height - _BOTTOM + 2, until_us),
    ]
    if strips:
        parts += _coordinator(world, until_us)
    return "\n".join([*parts, "</svg>", ""])


def _head(world: WorldDescription, shown: int) -> Iterator[str]:
    more = f", the first {shown} shown" if shown < len(world.nodes) else ""
    yield svg.text(14, 32, world.name, style="title")
    hour = f"{int(world.starts_at_hour):02d}:{int(world.starts_at_hour * 60) % 60:02d}"
    said = f"{several(len(world.nodes), 'node')}{more}; begins at {hour}, seed {world.seed}"
    yield svg.text(RIGHT, 32, said, style="quiet", anchor="end")
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
        yield from _sample_of(style, x, 58)
        yield svg.text(x + 22, 63, words)
        x += 40 + 6.4 * len(words)


def _sample_of(style: str, x: float, y: float) -> Iterator[str]:
    if style in ("up", "delay"):
        yield svg.line((x, y), (x + 16, y), style=style)
    else:
        yield svg.box((x, y - 6), (16, 12), style=style)
    if style == "down-area":
        yield svg.line((x, y - 6), (x + 16, y - 6), style="down")


def _coordinator(world: WorldDescription, until_us: int) -> list[str]:
    parts = [svg.text(14, _TOP + 13, COORDINATOR, style="name")]
    parts.append(svg.box((LEFT, _TOP), (WIDTH, 18), style="ground"))
    for fault in world.faults:
        if fault.target == COORDINATOR and fault.at_us < until_us:
            left = x_at(fault.at_us, until_us)
            size = (fault_width(fault, until_us), 18.0)
            parts.append(svg.box((left, _TOP), size, style=f"fault {fault.kind.value}"))
            parts.append(svg.text(left + 4, _TOP + 13, FAULT_WORDS[fault.kind], style="word"))
    return parts


def _axis(top: float, bottom: float, until_us: int) -> Iterator[str]:
    until_s = until_us / 1e6
    every_s = next((tick for tick in _TICKS_S if until_s / tick <= 12), _TICKS_S[-1])
    for tick in range(int(until_s / every_s) + 1):
        x = x_at(tick * every_s * 1_000_000, until_us)
        yield svg.line((x, top - 4), (x, bottom), style="grid")
        yield svg.text(x, bottom + 16, _spoken(tick * every_s), style="tick", anchor="middle")
    middle = LEFT + WIDTH / 2
    yield svg.text(middle, bottom + 36, "time since the start", style="quiet", anchor="middle")


def _spoken(seconds: int) -> str:
    if seconds < 120:
        return f"{seconds} s"
    minutes, rest = divmod(seconds, 60)
    if minutes < 120:
        return f"{minutes}:{rest:02d} min" if rest else f"{minutes} min"
    return f"{minutes // 60}:{minutes % 60:02d} h"

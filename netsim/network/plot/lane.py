"""One node's lane: rate above, delay and loss below, faults and absences behind both."""

import math
from collections.abc import Iterator

from hypergpu import svg
from netsim.link import NEVER_US
from netsim.network.plot.samples import Lane
from netsim.network.world import Fault, FaultKind

LEFT = 176.0
WIDTH = 860.0
RIGHT = LEFT + WIDTH
HEIGHT = 118.0
_RATE = 56.0
_DELAY = 36.0
_GAP = 8.0
_STEPS = (1, 1.5, 2, 3, 5, 7, 10)

FAULT_WORDS = {
    FaultKind.CRASH: "crash",
    FaultKind.PARTITION: "cut off",
    FaultKind.FLAP: "flapping",
    FaultKind.SLOW_DISK: "slow disk",
    FaultKind.CLOCK_JUMP: "clock jump",
    FaultKind.CORRUPT: "corrupts",
    FaultKind.LIE: "lies",
    FaultKind.SLOW_DEVICE: "slow device",
}


def lane_svg(lane: Lane, top: float, until_us: int) -> Iterator[str]:
    """The lane with its upper edge at ``top``."""
    yield svg.box((LEFT, top), (WIDTH, _RATE), style="ground")
    yield svg.box((LEFT, top + _RATE + _GAP), (WIDTH, _DELAY), style="ground")
    yield from _names(lane, top)
    yield from _absences(lane, top, until_us)
    yield from _faults(lane, top, until_us)
    yield from _rates(lane, top, until_us)
    yield from _delay_and_loss(lane, top + _RATE + _GAP, until_us)
    yield from _fault_words(lane, top, until_us)


def fault_width(fault: Fault, until_us: int) -> float:
    """How long a fault is on the page; a clock that jumped for good did so in an instant."""
    if fault.kind is FaultKind.CLOCK_JUMP and fault.until_us == NEVER_US:
        return 3.0
    return max(3.0, x_at(fault.until_us, until_us) - x_at(fault.at_us, until_us))


def x_at(at_us: int, until_us: int) -> float:
    """Where a moment lies."""
    return LEFT + WIDTH * min(at_us, until_us) / until_us


def _names(lane: Lane, top: float) -> Iterator[str]:
    node = lane.node
    yield svg.text(14, top + 16, node.name, style="name")
    yield svg.text(14, top + 33, node.profile or "own link", style="quiet")
    if node.step_floor_ms:
        yield svg.text(14, top + 49, f"step {node.step_floor_ms:g} ms", style="quiet")


def _rates(lane: Lane, top: float, until_us: int) -> Iterator[str]:
    peak = max(max(each.up_bits_per_s, each.down_bits_per_s) for each in lane.samples)
    if not peak:
        yield svg.text(LEFT + 8, top + 16, "no limit on the rate", style="quiet")
        return
    most = _rounded_up(peak / 1e6) * 1e6
    floor = top + _RATE
    for style, name in (("down", "down_bits_per_s"), ("up", "up_bits_per_s")):
        points = [
            (x_at(each.at_us, until_us), floor - _RATE * getattr(each, name) / most)
            for each in lane.samples
        ]
        if style == "down":
            yield svg.steps(points, RIGHT, style="down-area", floor=floor)
        yield svg.steps(points, RIGHT, style=style)
    yield svg.text(LEFT - 8, top + 9, f"{most / 1e6:g}", style="scale", anchor="end")
    yield svg.text(LEFT - 8, top + _RATE / 2 + 4, "Mbit/s", style="scale", anchor="end")
    yield svg.text(LEFT - 8, floor, "0", style="scale", anchor="end")


def _delay_and_loss(lane: Lane, top: float, until_us: int) -> Iterator[str]:
    floor = top + _DELAY
    most_ms = _rounded_up(max(each.rtt_us for each in lane.samples) / 1000 or 1)
    losses = [
        (x_at(each.at_us, until_us), floor - _DELAY * _loss_height(each.loss))
        for each in lane.samples
    ]
    yield svg.steps(losses, RIGHT, style="loss", floor=floor)
    least, most = (100 * pick(each.loss for each in lane.samples) for pick in (min, max))
    said = f"{least:.2g} %" if least == most else f"{least:.2g} to {most:.2g} %"
    yield svg.text(RIGHT + 8, floor, said if most else "no loss", style="loss-scale")
    delays = [
        (x_at(each.at_us, until_us), floor - _DELAY * each.rtt_us / 1000 / most_ms)
        for each in lane.samples
    ]
    yield svg.curve([*delays, (RIGHT, delays[-1][1])], style="delay")
    yield svg.text(LEFT - 8, top + 9, f"{most_ms:g} ms", style="scale", anchor="end")
    yield svg.text(LEFT - 8, floor, "0", style="scale", anchor="end")


def _absences(lane: Lane, top: float, until_us: int) -> Iterator[str]:
    for absence in lane.absences:
        left, right = x_at(absence.from_us, until_us), x_at(absence.until_us, until_us)
        size = (max(1.0, right - left), _RATE + _GAP + _DELAY)
        yield svg.box((left, top), size, style="away", title="away by churn")


def _faults(lane: Lane, top: float, until_us: int) -> Iterator[str]:
    for fault in lane.faults:
        if fault.at_us < until_us:
            left = x_at(fault.at_us, until_us)
            size = (fault_width(fault, until_us), _RATE + _GAP + _DELAY)
            style = f"fault {fault.kind.value}"
            yield svg.box((left, top), size, style=style, title=FAULT_WORDS[fault.kind])


def _fault_words(lane: Lane, top: float, until_us: int) -> Iterator[str]:
    y, free = top, 0.0
    for fault in lane.faults:
        if fault.at_us < until_us:
            x = x_at(fault.at_us, until_us) + 4
            y = y + 13 if x < free else top + 13
            free = x + 70
            yield svg.text(x, y, FAULT_WORDS[fault.kind], style="word")


def _loss_height(loss: float) -> float:
    """From 0.01 % at the bottom to 100 % at the top: profiles differ by powers of ten."""
    return min(1.0, max(0.0, 1 + math.log10(max(loss, 1e-9)) / 4))


def _rounded_up(number: float) -> float:
    """The next of 1, 1.5, 2, 3, 5, 7, 10, 15, ...: what a scale may end at."""
    if number <= 0:
        return 0
    power = 10.0 ** math.floor(math.log10(number))
    return next(round(step * power, 9) for step in _STEPS if step * power >= number * 0.999)

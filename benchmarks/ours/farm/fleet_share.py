"""Throughput and tail of unequal nodes on home lines, in virtual time.

Alone, a node does a job of its own share by the same machine over the same line. The share is what
all do together over the sum of what each does alone.
"""

from collections.abc import Sequence
from typing import NamedTuple

from benchmarks.ours.farm.virtual_farm import FarmFigures, VirtualFarm, VirtualLine, VirtualNode

ITEM_MS = 400.0
"""Time of an item on the slowest node."""
RESULT_BYTES = 1_600
"""An embedding of 384 numbers, with its part of the head."""
_MBIT = 1_000_000
LINES = (
    VirtualLine(18, 40 * _MBIT, 250 * _MBIT),
    VirtualLine(25, 10 * _MBIT, 50 * _MBIT),
    VirtualLine(35, 5 * _MBIT, 16 * _MBIT),
    VirtualLine(60, 20 * _MBIT, 100 * _MBIT),
)
"""Cable, two kinds of DSL, and mobile, as home lines are."""


class FleetShare(NamedTuple):
    """How well a fleet works together."""

    throughput_share: float
    tail_share: float


SLOW_LINE = VirtualLine(200, 750_000, 3 * _MBIT)
"""A line of the third generation of mobile networks."""


def fleet(
    nodes: int = 8,
    fastest_times: float = 16.0,
    *,
    lines: Sequence[VirtualLine] = LINES,
    queues_work: bool = True,
) -> list[VirtualNode]:
    """Nodes of speeds 1 to 16 times the slowest, in equal steps of the ratio."""
    return [
        VirtualNode(
            f"node-{number}",
            ITEM_MS / fastest_times ** (number / (nodes - 1)),
            lines[number % len(lines)],
            queues_work=queues_work,
        )
        for number in range(nodes)
    ]


def _run(items: int, nodes: list[VirtualNode], seed: int) -> FarmFigures:
    farm = VirtualFarm(items, nodes, seed, result_bytes=RESULT_BYTES, checked_permille=0)
    return farm.run()


def busy_share(items: int, seed: int, *, queues_work: bool) -> float:
    """Share of the time for which nodes on slow lines compute, of one job with checks.

    Args:
        items: Of the job.
        seed: Keys the draws of what is checked.
        queues_work: Whether nodes have their next bundle while they do one.
    """
    nodes = fleet(lines=[SLOW_LINE], queues_work=queues_work)
    figures = VirtualFarm(items, nodes, seed, result_bytes=RESULT_BYTES).run()
    all_items_per_ms = sum(1 / node.item_ms for node in nodes)
    return figures.computed_items / all_items_per_ms / figures.done_ms


def fleet_share(items: int, seed: int) -> FleetShare:
    """Measure one job of so many items."""
    nodes = fleet()
    together = _run(items, nodes, seed)
    alone_items_per_ms = 0.0
    all_items_per_ms = sum(1 / node.item_ms for node in nodes)
    for node in nodes:
        share = round(items / node.item_ms / all_items_per_ms)
        alone_items_per_ms += share / _run(share, [node], seed).done_ms
    return FleetShare(
        items / together.done_ms / alone_items_per_ms,
        (together.done_ms - together.ms_at_95) / together.ms_at_95,
    )

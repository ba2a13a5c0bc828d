"""Counting a train of packets, and telling a bad line from a port that lets nothing through. Pure.

A train that lost everything is kept back until the next: either something comes through again, and
it was an outage that counts, or three in a row are gone while the control stream lives, and then
datagrams are blocked here, which says nothing of the line.
"""

from collections.abc import Set
from typing import NamedTuple

from gpu_node.shell.probe.findings import TrainCount

BLOCKED_AFTER = 3
"""Trains in a row of which nothing came back."""


def count_missing(sent: int, arrived: Set[int]) -> TrainCount:
    """How many of the packets ``0 .. sent - 1`` are missing, and in how many runs."""
    missing = [packet not in arrived for packet in range(sent)]
    begins = [is_missing and not (at and missing[at - 1]) for at, is_missing in enumerate(missing)]
    return TrainCount(sent, sum(missing), sum(begins))


class Verdict(NamedTuple):
    """What trains are believed to say so far."""

    is_blocked: bool = False
    held: tuple[TrainCount, ...] = ()
    """Lost as a whole and not yet believed."""


def judge_train(before: Verdict, train: TrainCount) -> tuple[Verdict, tuple[TrainCount, ...]]:
    """The verdict after another train, and the trains that now count."""
    if train.lost < train.sent:
        return Verdict(), (*before.held, train)
    if before.is_blocked or len(before.held) + 1 >= BLOCKED_AFTER:
        return Verdict(is_blocked=True), ()
    return Verdict(held=(*before.held, train)), ()

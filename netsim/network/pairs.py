"""Times of hops between nodes, and backends in which nothing goes from node to node."""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from netsim.link import Link, NetsimError, PairDelay

PAIRS_MAX = 100_000
"""Pairs of a world at most."""
_Table = list[list[float]]


class HopTimes(NamedTuple):
    """Times of hops between nodes, one way, without what a message takes to be sent: ``[from][to]``
    with the coordinator behind all nodes, as `PlacementProblem.hop_us` has them.
    """

    direct_us: _Table
    """What a pair has of its own, else the delays of both links."""
    relayed_us: _Table
    """The same where all goes through the coordinator: pairs change nothing."""


def hop_times(
    links: Mapping[str, Link], coordinator: Link, pairs: Iterable[PairDelay] = ()
) -> HopTimes:
    """Times of hops of a world.

    Args:
        links: Of nodes by their names, in the order of the table.
        coordinator: Its own line.
        pairs: Of these nodes.
    """
    ends = [*links.values(), coordinator]
    places, driver = range(len(ends)), len(links)
    direct_us: _Table = [
        [0.0 if first == second else _way_us(ends[first], ends[second]) for second in places]
        for first in places
    ]
    relayed_us = [
        [
            direct_us[first][second]
            if driver in {first, second} or first == second
            else direct_us[first][driver] + direct_us[driver][second]
            for second in places
        ]
        for first in places
    ]
    numbers = {name: place for place, name in enumerate(links)}
    for pair in pairs:
        first, second = numbers[pair.first], numbers[pair.second]
        direct_us[first][second] = direct_us[second][first] = float(pair.delay_us)
    return HopTimes(direct_us, relayed_us)


def _way_us(sender: Link, receiver: Link) -> float:
    return float(sender.up.delay_us + receiver.down.delay_us)


def require_no_pairs(pairs: Iterable[PairDelay], what: str) -> None:
    """Reject delays of pairs where no packet goes from node to node.

    Args:
        pairs: Of a world.
        what: Carries its packets.

    Raises:
        NetsimError: There are some.
    """
    pair = next(iter(pairs), None)
    if pair is not None:
        detail = f"{pair.first} and {pair.second} have a delay of their own, and {what} carries"
        detail = f"{detail} nothing from node to node"
        raise NetsimError(detail, "use the tunnel, or leave [[pairs]] out")

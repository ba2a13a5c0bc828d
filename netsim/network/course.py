"""A world's links over time: what every backend asks instead of polling or drawing by itself."""

import heapq
from collections.abc import Iterator

import msgspec

from netsim.link import NEVER_US, Link, LinkCourse
from netsim.network.churn import Absence, absences
from netsim.network.world import FlapFault, NodeDescription, PartitionFault, WorldDescription


class LinkState(msgspec.Struct, frozen=True):
    """A node's link at a moment."""

    link: Link
    is_cut: bool
    """By a fault: what is sent is lost, both ways."""


class WorldCourse:
    """All links of one world over time. Equal worlds give equal links, whoever asks in what order.

    A node is asked for by its name; an unknown one is a KeyError.
    """

    def __init__(self, world: WorldDescription) -> None:
        self._world = world
        self._nodes = {node.name: node for node in world.nodes}
        self._courses: dict[str, LinkCourse] = {}
        self._cuts: dict[str, list[PartitionFault | FlapFault]] = {}
        for fault in world.faults:
            if isinstance(fault, PartitionFault | FlapFault):
                self._cuts.setdefault(fault.target, []).append(fault)

    def state(self, node: str, now_us: int) -> LinkState:
        """A node's link at a moment."""
        is_cut = any(_cuts(fault, now_us) for fault in self._cuts.get(node, ()))
        return LinkState(self._course(node).at(now_us), is_cut)

    def next_change_us(self, node: str, now_us: int) -> int:
        """The first moment after ``now_us`` at which it may be another; `NEVER_US` if none."""
        soonest = self._course(node).next_change_us(now_us)
        for fault in self._cuts.get(node, ()):
            soonest = min(soonest, _next_cut_us(fault, now_us))
        return soonest

    def changes(self, node: str, until_us: int) -> Iterator[tuple[int, LinkState]]:
        """The state at 0 and after each change before ``until_us``, in order of time."""
        now_us, state = 0, self.state(node, 0)
        yield now_us, state
        while (now_us := self.next_change_us(node, now_us)) < min(until_us, NEVER_US):
            if (changed := self.state(node, now_us)) != state:
                state = changed
                yield now_us, state

    def all_changes(self, until_us: int) -> Iterator[tuple[int, str, LinkState]]:
        """The changes of all nodes in order of time; nodes of one moment in order of name."""

        def changes_of(node: NodeDescription) -> Iterator[tuple[int, str, LinkState]]:
            for at_us, state in self.changes(node.name, until_us):
                yield at_us, node.name, state

        streams = [changes_of(node) for node in self._world.nodes]
        return heapq.merge(*streams, key=lambda change: change[:2])

    def absences(self, node: str, until_us: int) -> Iterator[Absence]:
        """When churn takes a node away, for absences that begin before ``until_us``."""
        churn = self._nodes[node].churn
        if churn is None:
            return
        key = self._world.key("churn", node)
        for absence in absences(churn, key=key, speed=self._world.churn_speed):
            if absence.from_us >= until_us:
                return
            yield absence

    def _course(self, node: str) -> LinkCourse:
        if node not in self._courses:
            self._courses[node] = self._nodes[node].shape.course(self._world.key("link", node))
        return self._courses[node]


def _cuts(fault: PartitionFault | FlapFault, now_us: int) -> bool:
    if not fault.at_us <= now_us < fault.until_us:
        return False
    if isinstance(fault, PartitionFault):
        return True
    every_us = fault.every_ms * 1000
    return (now_us - fault.at_us) % every_us < every_us // 2


def _next_cut_us(fault: PartitionFault | FlapFault, now_us: int) -> int:
    if now_us < fault.at_us:
        return fault.at_us
    if now_us >= fault.until_us:
        return NEVER_US
    if isinstance(fault, PartitionFault):
        return fault.until_us
    every_us = fault.every_ms * 1000
    half_us, since_us = every_us // 2, (now_us - fault.at_us) % every_us
    return min(fault.until_us, now_us + (half_us if since_us < half_us else every_us) - since_us)

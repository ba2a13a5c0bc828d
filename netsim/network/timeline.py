"""A world over time: its links' courses, and its faults and churn as actions in order. Pure.

What every backend asks instead of polling or drawing by itself.
"""

import heapq
from collections.abc import Iterator
from enum import StrEnum
from typing import NamedTuple

import msgspec
from msgspec.structs import replace

from netsim.link import NEVER_US, Link, LinkCourse, NetsimError, Shape
from netsim.network.world import (
    Absence,
    CrashFault,
    FlapFault,
    NodeDescription,
    PartitionFault,
    SlowDeviceFault,
    WorldDescription,
    WorldFault,
    absences,
)


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
        is_cut = any(_is_cut_by(fault, now_us) for fault in self._cuts.get(node, ()))
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
            if (new_state := self.state(node, now_us)) != state:
                state = new_state
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
            self._courses[node] = LinkCourse(
                self._nodes[node].shape, key=self._world.key("link", node)
            )
        return self._courses[node]


def _is_cut_by(fault: PartitionFault | FlapFault, now_us: int) -> bool:
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


_ONLY_VIRTUAL = {
    "slow_disk": "no disk of this machine is slowed down",
    "clock_jump": "this machine's clock stays as it is",
    "corrupt": "updates travel encrypted and signed",
    "lie": "the node's program does not lie",
    "silent": "the node's program does its work",
}


class ActionKind(StrEnum):
    """An effect on a node or the coordinator."""

    CUT = "cut"
    HEAL = "heal"
    KILL = "kill"
    START = "start"
    IMPAIR = "impair"
    REPAIR = "repair"


_ENDS = {ActionKind.KILL: ActionKind.START, ActionKind.IMPAIR: ActionKind.REPAIR}


class WorldAction(NamedTuple):
    """One action. Its time counts from when the first round begins."""

    at_us: int
    kind: ActionKind
    target: str
    fault: WorldFault | None = None
    """The fault of an impairment."""

    @property
    def slowness(self) -> float:
        """Factor on the steps of a device while it is impaired."""
        return self.fault.factor if isinstance(self.fault, SlowDeviceFault) else 1.0

    @property
    def sentence(self) -> str:
        """The action for people."""
        match self.kind:
            case ActionKind.CUT:
                return f"the link of {self.target} is cut"
            case ActionKind.HEAL:
                return f"the link of {self.target} is open again"
            case ActionKind.KILL:
                return f"SIGKILL to {self.target}"
            case ActionKind.START:
                return f"{self.target} is started again"
            case ActionKind.IMPAIR:
                return f"steps of {self.target} take {self.slowness:g} times as long"
            case ActionKind.REPAIR:
                return f"steps of {self.target} take as long as before"


def require_real_faults(world: WorldDescription) -> None:
    """Reject a world with faults that real programs cannot be given.

    Raises:
        NetsimError: Names the first such fault and why.
    """
    for fault in world.faults:
        if why := _ONLY_VIRTUAL.get(fault.kind):
            what = f"{fault.kind} of {fault.target} is impossible with real programs: {why}"
            raise NetsimError(what, "run this world in virtual time: --backend world")


def timeline(world: WorldDescription, until_us: int) -> Iterator[WorldAction]:
    """Yield every action before ``until_us`` in order of time; computed as they are taken."""
    course = WorldCourse(world)
    streams = [_cuts_and_heals(world, until_us)]
    streams += [_start_and_end(fault) for fault in world.faults]
    streams += [_absences(course, node.name, until_us) for node in world.nodes]
    for action in heapq.merge(*streams, key=lambda action: action[:3]):
        if action.at_us >= min(until_us, NEVER_US):
            return
        yield action


def _cuts_and_heals(world: WorldDescription, until_us: int) -> Iterator[WorldAction]:
    """Yield cuts by faults alone: what varies the links by itself is the backend's."""
    steady = tuple(replace(each, shape=Shape(link=each.link)) for each in world.nodes)
    for at_us, name, state in WorldCourse(replace(world, nodes=steady)).all_changes(until_us):
        if at_us or state.is_cut:
            yield WorldAction(at_us, ActionKind.CUT if state.is_cut else ActionKind.HEAL, name)


def _start_and_end(fault: WorldFault) -> Iterator[WorldAction]:
    if isinstance(fault, PartitionFault | FlapFault):
        return
    kind = ActionKind.KILL if isinstance(fault, CrashFault) else ActionKind.IMPAIR
    impairment = None if kind is ActionKind.KILL else fault
    yield WorldAction(fault.at_us, kind, fault.target, impairment)
    yield WorldAction(fault.until_us, _ENDS[kind], fault.target, impairment)


def _absences(course: WorldCourse, name: str, until_us: int) -> Iterator[WorldAction]:
    for absence in course.absences(name, until_us):
        yield WorldAction(absence.from_us, ActionKind.KILL, name)
        yield WorldAction(absence.until_us, ActionKind.START, name)

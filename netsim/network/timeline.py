"""The actions by which a world's faults and churn happen, in order of time. Pure."""

import heapq
from collections.abc import Iterator
from enum import StrEnum
from typing import NamedTuple

from msgspec.structs import replace

from netsim.link import NEVER_US, Shape
from netsim.link.error import NetsimError
from netsim.network.course import WorldCourse
from netsim.network.world import (
    CrashFault,
    FlapFault,
    PartitionFault,
    SlowDeviceFault,
    WorldDescription,
    WorldFault,
)

_ONLY_VIRTUAL = {
    "slow_disk": "no disk of this machine is slowed down",
    "clock_jump": "this machine's clock stays as it is",
    "corrupt": "updates travel encrypted and signed",
    "lie": "the node's program does not lie",
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
    streams = [_cuts(world, until_us)]
    streams += [_span(fault) for fault in world.faults]
    streams += [_absences(world, node.name, until_us) for node in world.nodes]
    for action in heapq.merge(*streams, key=lambda action: action[:3]):
        if action.at_us >= min(until_us, NEVER_US):
            return
        yield action


def _cuts(world: WorldDescription, until_us: int) -> Iterator[WorldAction]:
    """Yield cuts by faults alone: what varies the links by itself is the backend's."""
    steady = tuple(replace(each, shape=Shape(link=each.link)) for each in world.nodes)
    for at_us, name, state in WorldCourse(replace(world, nodes=steady)).all_changes(until_us):
        if at_us or state.is_cut:
            yield WorldAction(at_us, ActionKind.CUT if state.is_cut else ActionKind.HEAL, name)


def _span(fault: WorldFault) -> Iterator[WorldAction]:
    if isinstance(fault, PartitionFault | FlapFault):
        return
    kind = ActionKind.KILL if isinstance(fault, CrashFault) else ActionKind.IMPAIR
    impairment = None if kind is ActionKind.KILL else fault
    yield WorldAction(fault.at_us, kind, fault.target, impairment)
    yield WorldAction(fault.until_us, _ENDS[kind], fault.target, impairment)


def _absences(world: WorldDescription, name: str, until_us: int) -> Iterator[WorldAction]:
    for absence in WorldCourse(world).absences(name, until_us):
        yield WorldAction(absence.from_us, ActionKind.KILL, name)
        yield WorldAction(absence.until_us, ActionKind.START, name)

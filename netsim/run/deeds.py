"""What a world does to real programs and their links, and when. Pure."""

import heapq
from collections.abc import Iterator
from enum import StrEnum
from typing import NamedTuple

import msgspec

from netsim.error import NetsimError
from netsim.link import NEVER_US, Variation
from netsim.network.course import WorldCourse
from netsim.network.world import Fault, FaultKind, WorldDescription

_ONLY_VIRTUAL = {
    FaultKind.SLOW_DISK: "no disk of this machine is slowed down",
    FaultKind.CLOCK_JUMP: "this machine's clock stays as it is",
    FaultKind.CORRUPT: "updates travel encrypted and signed",
    FaultKind.LIE: "the node's program does not lie",
}


class DeedKind(StrEnum):
    """What is done to a node or the coordinator."""

    CUT = "cut"
    HEAL = "heal"
    KILL = "kill"
    START = "start"
    SLOW = "slow"
    HASTEN = "hasten"


class Deed(NamedTuple):
    """One thing done, counted from when the job begins."""

    at_us: int
    kind: DeedKind
    name: str
    factor: float = 1.0
    """Of a device that becomes slow: how many times as long its steps take."""

    @property
    def sentence(self) -> str:
        """For people."""
        match self.kind:
            case DeedKind.CUT:
                return f"{self.name}'s line is cut"
            case DeedKind.HEAL:
                return f"{self.name}'s line is whole again"
            case DeedKind.KILL:
                return f"SIGKILL to {self.name}"
            case DeedKind.START:
                return f"{self.name} is started again"
            case DeedKind.SLOW:
                return f"{self.name}'s device takes {self.factor:g} times as long"
            case DeedKind.HASTEN:
                return f"{self.name}'s device is as fast as before"


def refuse_unreal(world: WorldDescription) -> None:
    """Refuse a world with faults that real programs cannot be given.

    Raises:
        NetsimError: Names the first such fault and why.
    """
    for fault in world.faults:
        if why := _ONLY_VIRTUAL.get(fault.kind):
            what = f"{fault.kind} of {fault.target} cannot be had with real programs: {why}"
            raise NetsimError(what, "run this world in virtual time: --backend world")


def deeds(world: WorldDescription, until_us: int) -> Iterator[Deed]:
    """Everything that is done before ``until_us``, in order of time."""
    streams = [_cuts(world, until_us)]
    streams += [_crashes(fault) for fault in world.faults if fault.kind is FaultKind.CRASH]
    streams += [_slowness(fault) for fault in world.faults if fault.kind is FaultKind.SLOW_DEVICE]
    streams += [_absences(world, node.name, until_us) for node in world.nodes]
    for deed in heapq.merge(*streams):
        if deed.at_us >= min(until_us, NEVER_US):
            return
        yield deed


def _cuts(world: WorldDescription, until_us: int) -> Iterator[Deed]:
    """What varies the links by itself is the backend's; here are the faults alone."""
    bare = [msgspec.structs.replace(each, variation=Variation(), traces=()) for each in world.nodes]
    course = WorldCourse(msgspec.structs.replace(world, nodes=tuple(bare)))
    for at_us, name, state in course.all_changes(until_us):
        if at_us or state.is_cut:
            yield Deed(at_us, DeedKind.CUT if state.is_cut else DeedKind.HEAL, name)


def _crashes(fault: Fault) -> Iterator[Deed]:
    yield Deed(fault.at_us, DeedKind.KILL, fault.target)
    yield Deed(fault.until_us, DeedKind.START, fault.target)


def _slowness(fault: Fault) -> Iterator[Deed]:
    yield Deed(fault.at_us, DeedKind.SLOW, fault.target, fault.factor)
    yield Deed(fault.until_us, DeedKind.HASTEN, fault.target, fault.factor)


def _absences(world: WorldDescription, name: str, until_us: int) -> Iterator[Deed]:
    for absence in WorldCourse(world).absences(name, until_us):
        yield Deed(absence.from_us, DeedKind.KILL, name)
        yield Deed(absence.until_us, DeedKind.START, name)

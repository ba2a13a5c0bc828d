"""Carries out a world's timeline of faults and churn in virtual time."""

from msgspec.structs import replace

from netsim.network.timeline import ActionKind, WorldAction, timeline
from netsim.network.world import (
    COORDINATOR,
    CorruptFault,
    LieFault,
    SlowDeviceFault,
    SlowDiskFault,
    WorldDescription,
    WorldFault,
)
from netsim.virtual.agenda import Agenda
from netsim.virtual.coordinator_actor import CoordinatorActor
from netsim.virtual.node_actor import NodeActor

_HORIZON_US = 1 << 60


class FaultScript:
    """Plans a description's actions, each when the one before it has happened.

    A clock jump changes nothing: cores read monotonic time only.
    """

    def __init__(
        self,
        agenda: Agenda,
        description: WorldDescription,
        coordinator: CoordinatorActor,
        nodes: list[NodeActor],
    ) -> None:
        self._agenda = agenda
        self._actions = timeline(description, _HORIZON_US)
        self._coordinator = coordinator
        self._nodes = {str(node.node): node for node in nodes}

    def plan_next(self) -> None:
        """Put the next action on the agenda."""
        action = next(self._actions, None)
        if action is not None:
            self._agenda.at(action.at_us // 1000, lambda: self._carry_out(action))

    def _carry_out(self, action: WorldAction) -> None:
        if action.target == COORDINATOR:
            self._act_on_coordinator(action)
        else:
            self._act_on_node(action, self._nodes[action.target])
        self.plan_next()

    def _act_on_coordinator(self, action: WorldAction) -> None:
        match action.kind:
            case ActionKind.KILL:
                self._coordinator.crash(list(self._nodes.values()))
            case ActionKind.START:
                self._coordinator.restart()
            case _:
                if isinstance(action.fault, SlowDiskFault):
                    rate = action.fault.bytes_per_s if action.kind is ActionKind.IMPAIR else 0
                    self._coordinator.disk_bytes_per_s = rate

    def _act_on_node(self, action: WorldAction, node: NodeActor) -> None:
        match action.kind:
            case ActionKind.CUT:
                node.unplug("the link is cut")
            case ActionKind.HEAL:
                node.plug()
            case ActionKind.KILL:
                node.crash()
            case ActionKind.START:
                node.revive()
            case ActionKind.IMPAIR | ActionKind.REPAIR:
                assert action.fault is not None  # noqa: S101 - an impairment has its fault
                _impair(node, action.fault, is_over=action.kind is ActionKind.REPAIR)


def _impair(node: NodeActor, fault: WorldFault, *, is_over: bool) -> None:
    match fault:
        case SlowDeviceFault(factor=factor):
            node.step_ms *= 1 / factor if is_over else factor
        case SlowDiskFault(bytes_per_s=rate):
            node.ills = replace(node.ills, disk_bytes_per_s=0 if is_over else rate)
        case CorruptFault(percent=percent):
            node.ills = replace(node.ills, corruption=0.0 if is_over else percent / 100)
        case LieFault(factor=factor):
            node.ills = replace(node.ills, lie=1.0 if is_over else factor)
        case _:
            pass

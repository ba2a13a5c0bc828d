"""What a world file lets go wrong, on virtual time: its script of faults, and churn."""

from collections.abc import Iterator

from msgspec.structs import replace

from netsim.link import NEVER_US
from netsim.network.churn import Absence, absences
from netsim.network.world import COORDINATOR, Fault, FaultKind, WorldDescription
from netsim.virtual.agenda import Agenda, Deed
from netsim.virtual.coordinator_actor import CoordinatorActor
from netsim.virtual.node_actor import Ills, NodeActor


class FaultScript:
    """Plans every fault of a description.

    A clock jump changes nothing here, which is the point: cores hear monotonic time only.
    """

    def __init__(
        self,
        agenda: Agenda,
        description: WorldDescription,
        coordinator: CoordinatorActor,
        nodes: list[NodeActor],
    ) -> None:
        self._agenda = agenda
        self._description = description
        self._coordinator = coordinator
        self._nodes = {str(node.node): node for node in nodes}

    def plan(self) -> None:
        """Put everything on the agenda. Each fault plans its own end, each absence the next."""
        for fault in self._description.faults:
            self._at(fault.at_us, self._deed(fault))
        for described in self._description.nodes:
            if described.churn is not None:
                key = self._description.key("churn", described.name)
                away = absences(described.churn, key=key, speed=self._description.churn_speed)
                self._leave_next(self._nodes[described.name], away)

    def _at(self, at_us: int, deed: Deed) -> None:
        if at_us < NEVER_US:
            self._agenda.at(at_us // 1000, deed)

    def _leave_next(self, node: NodeActor, away: Iterator[Absence]) -> None:
        absence = next(away)

        def leave() -> None:
            node.crash()
            self._at(absence.until_us, come_back)

        def come_back() -> None:
            node.revive()
            self._leave_next(node, away)

        self._at(absence.from_us, leave)

    def _deed(self, fault: Fault) -> Deed:
        if fault.target == COORDINATOR:
            return lambda: self._strike_coordinator(fault)
        return lambda: self._strike(fault, self._nodes[fault.target])

    def _strike_coordinator(self, fault: Fault) -> None:
        if fault.kind is FaultKind.CRASH:
            away_ms = (fault.until_us - fault.at_us) // 1000
            self._coordinator.crash(list(self._nodes.values()), away_ms)
        elif fault.kind is FaultKind.SLOW_DISK:
            self._coordinator.disk_bytes_per_s = fault.bytes_per_s
            self._at(fault.until_us, self._mend_coordinator)

    def _mend_coordinator(self) -> None:
        self._coordinator.disk_bytes_per_s = 0

    def _strike(self, fault: Fault, node: NodeActor) -> None:
        match fault.kind:
            case FaultKind.CRASH:
                node.crash()
                self._at(fault.until_us, node.revive)
            case FaultKind.PARTITION:
                node.unplug("partitioned")
                self._at(fault.until_us, node.plug)
            case FaultKind.FLAP:
                self._flap(fault, node)
            case FaultKind.CLOCK_JUMP:
                pass
            case FaultKind.SLOW_DEVICE:
                node.step_ms *= fault.factor
                self._at(fault.until_us, lambda: _mend_device(node, fault))
            case FaultKind.SLOW_DISK | FaultKind.CORRUPT | FaultKind.LIE:
                node.ills = _sickened(node.ills, fault)
                self._at(fault.until_us, lambda: _mend(node, fault))

    def _flap(self, fault: Fault, node: NodeActor) -> None:
        """Cut for the first half of every ``every_us``, until the fault is over."""
        now_us = self._agenda.now_ms * 1000
        if now_us >= fault.until_us:
            return
        node.unplug("flapping")
        self._at(min(now_us + fault.every_us // 2, fault.until_us), node.plug)
        self._at(now_us + max(1000, fault.every_us), lambda: self._flap(fault, node))


def _sickened(ills: Ills, fault: Fault) -> Ills:
    if fault.kind is FaultKind.SLOW_DISK:
        return replace(ills, disk_bytes_per_s=fault.bytes_per_s)
    if fault.kind is FaultKind.CORRUPT:
        return replace(ills, corruption=fault.share)
    return replace(ills, lie=fault.factor)


def _mend_device(node: NodeActor, fault: Fault) -> None:
    node.step_ms /= fault.factor


def _mend(node: NodeActor, fault: Fault) -> None:
    well = Ills()
    if fault.kind is FaultKind.SLOW_DISK:
        node.ills = replace(node.ills, disk_bytes_per_s=well.disk_bytes_per_s)
    elif fault.kind is FaultKind.CORRUPT:
        node.ills = replace(node.ills, corruption=well.corruption)
    else:
        node.ills = replace(node.ills, lie=well.lie)

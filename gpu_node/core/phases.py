"""When the phases of the work at hand began, read off the steps of the node's core."""

from gpu_node.core import events
from gpu_node.core.commands import FetchInputs, NodeCommand, SendResult, SendUpdate
from gpu_node.core.next_work import next_lease
from gpu_node.core.session_state import Executing, SessionStep
from hypergpu.assignment import Lease
from hypergpu.phases import PhaseDurations, WorkPhase
from hypergpu.units import Milliseconds


class PhaseClock:
    """Beginnings of the phases under the newest lease that work was done under.

    What was done before a restart of the daemon, or under an earlier lease, is not counted.
    """

    def __init__(self) -> None:
        self.lease: Lease | None = None
        self._began_ms: dict[WorkPhase, Milliseconds] = {}
        self._encode_ms = Milliseconds(0)

    def note(self, event: events.NodeEvent, commands: tuple[NodeCommand, ...]) -> None:
        """Note the phases that an event, or the commands it led to, begin."""
        match event:
            case events.InputsFetched(lease=lease) if lease == self.lease:
                self._begin(WorkPhase.TRAIN, event.at_ms)
            case events.TrainingFinished(lease=lease, update=update) if lease == self.lease:
                self._begin(WorkPhase.WAIT, event.at_ms)
                self._encode_ms = update.encode_ms
        for command in commands:
            if isinstance(command, FetchInputs | SendUpdate | SendResult):
                self._take_lease(command.assignment.lease)
                is_upload = not isinstance(command, FetchInputs)
                self._begin(WorkPhase.UPLOAD if is_upload else WorkPhase.DOWNLOAD, event.at_ms)

    def note_step(self, event: events.NodeEvent, step: SessionStep) -> None:
        """Note the phases of the work at hand alone: of the next work none has begun."""
        session, after = step.session, next_lease(step.session)
        begun_commands = tuple(
            each
            for each in step.commands
            if not isinstance(each, FetchInputs) or each.assignment.lease != after
        )
        self.note(event, begun_commands)
        if isinstance(session.work, Executing) and self.lease != session.work.assignment.lease:
            self._take_lease(session.work.assignment.lease)
            self._begin(WorkPhase.TRAIN, event.at_ms)

    def has_trained(self, lease: Lease) -> bool:
        """Whether the training under a lease ended since the daemon started."""
        return lease == self.lease and WorkPhase.WAIT in self._began_ms

    @property
    def newest(self) -> tuple[Lease, WorkPhase] | None:
        """The phase that began last, and the lease of the work; None: there was no work yet."""
        if self.lease is None or not self._began_ms:
            return None
        return self.lease, list(self._began_ms)[-1]

    def _take_lease(self, lease: Lease) -> None:
        if lease != self.lease:
            self.lease, self._began_ms, self._encode_ms = lease, {}, Milliseconds(0)

    def _begin(self, phase: WorkPhase, at_ms: Milliseconds) -> None:
        """Begin a phase unless this is only another attempt at it."""
        self._began_ms.setdefault(phase, at_ms)

    def durations(self, lease: Lease, now_ms: Milliseconds) -> PhaseDurations | None:
        """Durations until now of the phases under a lease; None: nothing was done under it."""
        if lease != self.lease:
            return None
        ends = [*list(self._began_ms.values())[1:], now_ms]
        took = {
            f"{phase.value}_ms": max(0, end_ms - began_ms)
            for (phase, began_ms), end_ms in zip(self._began_ms.items(), ends, strict=True)
        }
        encode_ms = min(self._encode_ms, took.get("train_ms", 0))
        took |= {"train_ms": took.get("train_ms", 0) - encode_ms, "encode_ms": encode_ms}
        return PhaseDurations(**{name: Milliseconds(ms) for name, ms in took.items()})

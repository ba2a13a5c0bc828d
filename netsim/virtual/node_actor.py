"""A virtual node: the daemon's real core, with a shell made of virtual time."""

import random
from collections.abc import Callable
from typing import Protocol

import msgspec
from blake3 import blake3

from coordinator.core.network.reading import (
    Observation,
    Presence,
    StepTime,
    TransferDirection,
    TransferTime,
)
from coordinator.core.work.node_fit import NodeFeatures
from gpu_node.core import commands, events
from gpu_node.core.commands import NodeCommand
from gpu_node.core.events import NodeEvent, TrainedUpdate
from gpu_node.core.memory import TrainingStart
from gpu_node.core.session import transition
from gpu_node.core.session_state import NodeSession
from hypergpu.assignment import Assignment, FailureCause, Lease, Prefetch
from hypergpu.goodput import SMALLEST_BYTES
from hypergpu.ids import Digest, JobId, NodeId
from hypergpu.optimizer import pass_sizes
from hypergpu.units import Bytes, Microseconds, Milliseconds, Samples
from netsim.virtual.node_link import NodeLink, TransferWay
from netsim.virtual.sharing import Agenda
from netsim.virtual.worlds import SpeedLie, TransferSizes

_DIAL_FAILED_MS = 50
TRAIN_MS = 30
"""Between a node's last input and its first step, and after its last one: files, pipes, digests.
Fitted to rounds of a small model, 0.86 s.
"""


_AT_HAND_MS = 15
"""Until a model that needs no bytes is there: found in the cache, or drawn by the worker. Measured
with a million parameters: 12 ms.
"""


class Upstream(Protocol):
    """What a virtual node needs of the virtual coordinator."""

    def is_up(self) -> bool: ...

    def attach_node(self, node: "NodeActor") -> None: ...

    def detach_node(self, node: "NodeActor") -> None: ...

    def admit_update(self, node: NodeId, lease: Lease, update: TrainedUpdate) -> str:
        """Empty when it was accepted, else the refusal."""

    def reject_damaged(self, node: NodeId, lease: Lease) -> str:
        """An update's bytes are not what its digest names; the refusal."""

    def take_back(self, node: NodeId, back: commands.HandBack) -> None: ...

    def drain_node(self, node: NodeId, reason: str) -> None: ...

    def observe(self, node: NodeId, observation: Observation) -> None: ...


class NodeFaults(msgspec.Struct, frozen=True):
    """Faults of a node at the moment."""

    worker_death: float = 0.0
    """Share of trainings that kill the worker process."""
    disk_bytes_per_s: int = 0
    """What arrives or leaves passes the disk at this rate; 0: at once."""
    corruption: float = 0.0
    """Share of updates that arrive with other bytes than were sent."""
    lie: float = 1.0
    """What the node multiplies its pseudo-gradients by."""
    is_silent: bool = False
    """Whether the node heartbeats and takes work, and never ends any."""


class VirtualDevice(msgspec.Struct, frozen=True):
    """The machine of a node."""

    features: NodeFeatures = {}
    """What jobs may require of it."""
    micro_batch_max: int = 0
    """More samples at once end its worker: they do not fit into memory; 0: all do."""


class NodeActor:
    """One node. A connection is a number; what belongs to an older one is lost on the way."""

    def __init__(
        self, node: NodeId, agenda: Agenda, upstream: Upstream, link: NodeLink, dice: random.Random
    ) -> None:
        self.node = node
        self.link = link
        self.connection = 0
        self.is_connected = False
        self.cuts = 0
        """How many faults keep it from the coordinator now."""
        self.is_alive = False
        self.step_ms = 10.0
        self.sizes = TransferSizes()
        self.model_ms = 0
        """What the size of the model adds to a training."""
        self.starting_ms = 0
        """How long its worker takes to start once it is back."""
        self.faults = NodeFaults()
        self.speed_lie = SpeedLie()
        self.device = VirtualDevice()
        self.downloads_ms: list[int] = []
        self.uploads_ms: list[int] = []
        self._agenda = agenda
        self._upstream = upstream
        self._dice = dice
        self._life = 0
        self._ready_ms = Milliseconds(0)
        self._training: Lease | None = None
        self._begun: tuple[Prefetch | None, Milliseconds] = (None, Milliseconds(0))
        """What its worker has taken up of the next round, and since when."""
        self._models: dict[JobId, Digest] = {}
        """Newest model of each job here. Survives a crash."""
        self._session = NodeSession(node=node)

    @property
    def session(self) -> NodeSession:
        """State of the node's core."""
        return self._session

    def start(self) -> None:
        """Start the daemon with what an earlier life persisted."""
        self._life += 1
        self._training, self._begun = None, (None, Milliseconds(0))
        self.is_alive = True
        self._session = NodeSession(node=self.node, memory=self._session.memory)
        self.apply(events.Started(at_ms=self._agenda.now_ms, has_certificate=True))

    def revive(self) -> None:
        """Start the daemon if it is not there."""
        if not self.is_alive:
            self._ready_ms = Milliseconds(self._agenda.now_ms + self.starting_ms)
            self.start()
            if self.starting_ms:
                self._later(self.starting_ms, self._ready)

    @property
    def is_starting(self) -> bool:
        """Whether work would wait for its worker."""
        return self._agenda.now_ms < self._ready_ms

    def _ready(self) -> None:
        if self.is_connected:
            now = Presence(self._agenda.now_ms, is_present=True)
            self._say(lambda: self._upstream.observe(self.node, now))

    def unplug(self, reason: str) -> None:
        """Cut the line; it stays cut until each who unplugged it has plugged it in again."""
        self.cuts += 1
        self.cut(reason)

    def plug(self) -> None:
        """Take one cut back. The node dials again by itself."""
        self.cuts -= 1

    def crash(self) -> None:
        """SIGKILL: everything but the memory is gone."""
        self.is_alive = False
        self._life += 1
        self._break()

    def _leave(self) -> None:
        """End in good order: what was said last still arrives before the connection closes."""
        self.is_alive = False
        self._life += 1
        self._agenda.after(
            self.link.message_ms(TransferWay.UP) + 1,
            lambda: None if self.is_alive else self._break(),
        )

    def cut(self, reason: str) -> None:
        """The connection breaks; both sides notice."""
        if self.is_connected:
            self._break()
            self.apply(events.LinkLost(at_ms=self._agenda.now_ms, reason=reason))

    def _break(self) -> None:
        if self.is_connected:
            self.is_connected = False
            self.connection += 1
            self.link.cut()
            self._upstream.detach_node(self)

    def apply(self, event: NodeEvent) -> None:
        """Advance the core and do what it asks for."""
        if not self.is_alive:
            return
        self._session, todo = transition(self._session, event)
        for command in todo:
            self._perform(command)

    def deliver(self, make: Callable[[Milliseconds], NodeEvent]) -> None:
        """A message of the coordinator, sent now over the present connection."""
        connection = self.connection

        def arrive() -> None:
            if self.connection == connection:
                self.apply(make(self._agenda.now_ms))

        self._agenda.after(self.link.message_ms(TransferWay.DOWN), arrive)

    def _later(self, wait_ms: int, callback: Callable[[], None]) -> None:
        """Something of this life: a crash before then makes it never happen."""
        life = self._life
        self._agenda.after(wait_ms, lambda: callback() if self._life == life else None)

    def _perform(self, command: NodeCommand) -> None:
        match command:
            case commands.OpenLink():
                self._later(self.link.dial_ms(), self._dial)
            case commands.HandBack() as back:
                self._say(lambda: self._upstream.take_back(self.node, back))
            case commands.AnnounceDraining(reason=reason):
                self._say(lambda: self._upstream.drain_node(self.node, reason))
            case commands.SetTimer(timer=timer, at_ms=at_ms):
                wait_ms = at_ms - self._agenda.now_ms
                self._later(wait_ms, lambda: self.apply(self._timer_event(timer)))
            case commands.Leave():
                self._leave()
            case _:
                self._work(command)

    def _work(self, command: NodeCommand) -> None:
        match command:
            case commands.FetchInputs(assignment=Assignment() as assignment):
                self._fetch(assignment)
            case commands.StartTraining(assignment=assignment, start=start):
                self._train(assignment, start)
            case commands.AbortTraining(lease=lease):
                self._later(1, lambda: self._abort_training(lease))
            case commands.SendUpdate(assignment=assignment, update=update):
                self._upload(assignment.lease, update)
            case _:
                pass

    def _timer_event(self, timer: events.Timer) -> NodeEvent:
        return events.TimerFired(at_ms=self._agenda.now_ms, timer=timer)

    def _dial(self) -> None:
        if not (self._upstream.is_up() and not self.cuts):
            self._later(
                _DIAL_FAILED_MS,
                lambda: self.apply(
                    events.LinkLost(at_ms=self._agenda.now_ms, reason="nobody answers")
                ),
            )
            return
        self.connection += 1
        self.is_connected = True
        self.apply(events.Connected(at_ms=self._agenda.now_ms))
        self._upstream.attach_node(self)

    def _say(self, callback: Callable[[], None]) -> None:
        connection = self.connection
        self._agenda.after(
            self.link.message_ms(TransferWay.UP),
            lambda: callback() if self.connection == connection else None,
        )

    def _fetch(self, assignment: Assignment) -> None:
        connection, lease = self.connection, assignment.lease
        size_bytes = self._missing_bytes(assignment)
        if not size_bytes:
            self._later(_AT_HAND_MS, lambda: self._finish_fetch(assignment))
            return
        wait_ms = self.link.message_ms(TransferWay.UP) + self._disk_ms(size_bytes)
        lines = assignment.connections

        def arrive(took_ms: int) -> None:
            now_ms = self._agenda.now_ms
            if self.connection == connection:
                self.downloads_ms.append(took_ms)
                self._report_transfer(
                    TransferDirection.DOWN, size_bytes, took_ms - wait_ms, connections=lines
                )
                self._finish_fetch(assignment)
            else:
                self.apply(events.FetchBroken(at_ms=now_ms, lease=lease, reason="cut off"))

        self.link.move(TransferWay.DOWN, size_bytes, arrive, wait_ms=wait_ms, connections=lines)

    def _finish_fetch(self, assignment: Assignment) -> None:
        lease = assignment.lease
        self._models[lease.job_id] = assignment.task.model.digest
        self.apply(events.InputsFetched(at_ms=self._agenda.now_ms, lease=lease))

    def _report_transfer(
        self, direction: TransferDirection, size_bytes: Bytes, took_ms: int, *, connections: int
    ) -> None:
        if size_bytes >= SMALLEST_BYTES:
            took_us = Microseconds(1000 * max(1, took_ms))
            now_ms = self._agenda.now_ms
            transfer = TransferTime(now_ms, direction, size_bytes, took_us, connections)
            self._upstream.observe(self.node, transfer)

    def _missing_bytes(self, assignment: Assignment) -> Bytes:
        """Nothing, the deltas that lead on from the newest model here, or all of it.

        The job's first model is drawn by whoever needs it.
        """
        model, deltas, initial = assignment.task.model, assignment.deltas, assignment.initial
        held_models = {
            self._models.get(assignment.lease.job_id),
            initial.digest if initial else None,
        }
        if model.digest in held_models:
            return Bytes(0)
        places = [place for place, delta in enumerate(deltas) if delta.base in held_models]
        if not places:
            return model.size_bytes
        led_on = sum(delta.blob.size_bytes for delta in deltas[places[-1] :])
        return min(model.size_bytes, Bytes(led_on))

    def _disk_ms(self, size_bytes: Bytes) -> int:
        rate = self.faults.disk_bytes_per_s
        return -(-size_bytes * 1000 // rate) if rate else 0

    def _train(self, assignment: Assignment, start: TrainingStart) -> None:
        lease = assignment.lease
        self._training = lease
        full_steps = assignment.task.full_steps
        whole_ms = Milliseconds(round(full_steps * self.step_ms) + TRAIN_MS + self.model_ms)
        compute_ms = whole_ms - self._taken_ahead_ms(assignment, start)
        if self._dice.random() < self.faults.worker_death:
            self._later(compute_ms // 2, lambda: self._end_worker(lease, "killed"))
            return
        task = assignment.task
        largest = pass_sizes(task.batch_size, task.optimizer.micro_batch)[0]
        if 0 < self.device.micro_batch_max < largest:
            cause = FailureCause.OUT_OF_MEMORY
            reason = f"{cause.value}: {largest} samples at once do not fit"
            self._later(TRAIN_MS, lambda: self._end_worker(lease, reason, cause))
            return
        starting_ms = max(0, self._ready_ms - self._agenda.now_ms)
        name = msgspec.json.encode((assignment.slot, repr(start), assignment.task, self.faults.lie))
        digest = Digest(blake3(name).hexdigest())
        samples = Samples(sum(range_.count for range_ in assignment.task.ranges))
        size_bytes = self.sizes.update_bytes(assignment.task.codec)
        # Unequal ones, of which some are less than a round's samples.
        own = Samples(40 * (1 + assignment.slot % 7) if assignment.task.data_name else 0)
        steps = assignment.task.inner_steps
        update = TrainedUpdate(digest, size_bytes, steps, samples, data_samples=own)
        self._later(
            starting_ms + compute_ms + self.speed_lie.hold_ms,
            lambda: self._finish_training(assignment, update, whole_ms),
        )

    def _taken_ahead_ms(self, assignment: Assignment, start: TrainingStart) -> int:
        """What the worker has done of it already. Whatever it did of anything else was in vain."""
        (own_prefetch, since_ms), self._begun = self._begun, (None, Milliseconds(0))
        task = assignment.task
        task_prefetch = task.prefetched
        if (
            task_prefetch is None
            or own_prefetch != task_prefetch
            or start.resume_from != task_prefetch.round - 1
        ):
            return 0
        most_ms = round(
            task.full_steps * task_prefetch.inner_steps / task.inner_steps * self.step_ms
        )
        return min(most_ms, self._agenda.now_ms - since_ms)

    def _finish_training(
        self, assignment: Assignment, update: TrainedUpdate, took_ms: Milliseconds
    ) -> None:
        lease = assignment.lease
        if self._training == lease and not self.faults.is_silent:
            self._training = None
            now_ms = self._agenda.now_ms
            self._begun = (assignment.prefetch, now_ms)
            stated_ms = Milliseconds(max(1, round(self.speed_lie.stated_share * took_ms)))
            took = StepTime(now_ms, assignment.task.full_steps, stated_ms)
            self._say(lambda: self._upstream.observe(self.node, took))
            self.apply(events.TrainingFinished(at_ms=now_ms, lease=lease, update=update))

    def _end_worker(
        self, lease: Lease, reason: str, cause: FailureCause = FailureCause.OTHER
    ) -> None:
        if self._training == lease:
            self._training = None
            self.apply(events.WorkerDied(at_ms=self._agenda.now_ms, reason=reason, cause=cause))

    def _abort_training(self, lease: Lease) -> None:
        if self._training == lease:
            self._training = None
            self.apply(events.TrainingAborted(at_ms=self._agenda.now_ms, lease=lease))

    def _upload(self, lease: Lease, update: TrainedUpdate) -> None:
        connection = self.connection
        current_work = self._session.current
        lines = current_work.connections if isinstance(current_work, Assignment) else 1

        def arrive(took_ms: int) -> None:
            if self.connection != connection:
                self._break_upload(lease, "cut off")
                return
            self._report_transfer(
                TransferDirection.UP, update.size_bytes, took_ms - wait_ms, connections=lines
            )
            is_damaged = self._dice.random() < self.faults.corruption
            if is_damaged:
                refusal = self._upstream.reject_damaged(self.node, lease)
            else:
                self.uploads_ms.append(took_ms)
                refusal = self._upstream.admit_update(self.node, lease, update)
            answer = self._damage_answered if is_damaged else self._take_answer
            self._later(
                self.link.message_ms(TransferWay.DOWN), lambda: answer(connection, lease, refusal)
            )

        # The bytes follow when the coordinator has admitted the header.
        admission_ms = self.link.message_ms(TransferWay.UP) + self.link.message_ms(TransferWay.DOWN)
        wait_ms = admission_ms + self._disk_ms(update.size_bytes)
        self.link.move(
            TransferWay.UP, update.size_bytes, arrive, wait_ms=wait_ms, connections=lines
        )

    def _damage_answered(self, connection: int, lease: Lease, refusal: str) -> None:
        """What was sent is well: it is sent again."""
        self._break_upload(lease, refusal if self.connection == connection else "cut off")

    def _take_answer(self, connection: int, lease: Lease, refusal: str) -> None:
        now_ms = self._agenda.now_ms
        if self.connection != connection:
            self._break_upload(lease, "cut off")
        elif refusal:
            self.apply(events.UploadLate(at_ms=now_ms, lease=lease, reason=refusal))
        else:
            self.apply(events.UploadAccepted(at_ms=now_ms, lease=lease))

    def _break_upload(self, lease: Lease, reason: str) -> None:
        now_ms = self._agenda.now_ms
        self.apply(events.UploadBroken(at_ms=now_ms, lease=lease, reason=reason))

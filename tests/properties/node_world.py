"""A coordinator, a disk and a worker as small as can be, around the node's real machine.

The worker's mass is exact: each training adds 1,000 to what it starts from and sends all but a
remainder, so that what is neither in the model nor in a residual shows at once.
"""

from collections.abc import Callable
from functools import singledispatchmethod

import msgspec

from gpu_node.core import commands
from gpu_node.core.end_states import Memory
from gpu_node.core.events import NodeEvent, Timer
from gpu_node.core.session import transition
from gpu_node.core.state import NodeSession
from gpu_node.core.update import TrainedUpdate
from hypergpu.ids import Digest, JobId, NodeId, Slot
from hypergpu.statements.assignment import Assignment, BlobRef, Lease, SampleRange, Task
from hypergpu.units import Bytes, Milliseconds, Samples

NODE = NodeId("0x" + "b2" * 20)
GAIN = 1_000


class Sent(msgspec.Struct):
    """What one training left on disk, and everything that led to it."""

    name: Digest
    residual: int
    message: int
    gained: int
    """Mass of all trainings in this lineage since it started fresh."""
    lineage: tuple[Digest, ...]


class AssignedJob(msgspec.Struct):
    """The coordinator's side of one job, as far as this node goes."""

    job_id: JobId
    round: int = 0
    start: int = 0
    last_accepted: Digest | None = None
    assignment: Assignment | None = None
    """What the node owes."""


class NodeWorld:
    """Performs commands and keeps the books."""

    def __init__(self) -> None:
        self.session: NodeSession = NodeSession(node=NODE)
        self.persisted = Memory()
        self.now_ms = 0
        self.numbers = 0
        self.jobs = {JobId(name): AssignedJob(JobId(name)) for name in ("job-a", "job-b")}
        self.accepted: dict[Digest, int] = {}
        self.disk: dict[tuple[JobId, int], Sent] = {}
        self.fetching: list[Lease] = []
        self.uploading: dict[Lease, TrainedUpdate] = {}
        self.training: commands.StartTraining | None = None
        self.is_dialling = False
        self.is_starting_worker = False
        self.timers: dict[Timer, int] = {}
        self.has_left = False

    def happen(self, make: Callable[[Milliseconds], NodeEvent]) -> None:
        """One event, and its commands."""
        self.now_ms += 1
        before = self.session.memory
        self.session, commands = transition(self.session, make(Milliseconds(self.now_ms)))
        if self.session.memory is not before:
            self.persisted = msgspec.json.decode(
                msgspec.json.encode(self.session.memory), type=Memory
            )
        for command in commands:
            self.perform(command)

    def restart(self) -> None:
        """The daemon is killed and started again: only memory and disk remain."""
        self.session = NodeSession(node=NODE, memory=self.persisted)
        self.fetching, self.uploading, self.training = [], {}, None
        self.is_dialling, self.is_starting_worker, self.timers = False, False, {}

    @singledispatchmethod
    def perform(self, command: commands.NodeCommand) -> None:
        """Commands without a place here change nothing."""

    @perform.register
    def _(self, command: commands.OpenLink) -> None:
        self.is_dialling = True

    @perform.register
    def _(self, command: commands.SetTimer) -> None:
        self.timers[command.timer] = command.at_ms

    @perform.register
    def _(self, command: commands.FetchInputs) -> None:
        assert self.session.is_connected
        if command.assignment.lease not in self.fetching:
            self.fetching.append(command.assignment.lease)

    @perform.register
    def _(self, command: commands.StopFetch) -> None:
        self.fetching = [lease for lease in self.fetching if lease != command.lease]

    @perform.register
    def _(self, command: commands.StartTraining) -> None:
        assert self.training is None, "two trainings at once"
        job_id = command.assignment.lease.job_id
        self.disk = {
            (job, number): sent
            for (job, number), sent in self.disk.items()
            if job != job_id or number in command.kept_rounds
        }
        if (resumed := command.start.resume_from) is not None:
            origin = self.disk[job_id, resumed]
            is_returned = command.start.returns_update
            assert is_returned == (origin.name not in self.accepted), "accepted and returned differ"
        self.training = command

    @perform.register
    def _(self, command: commands.AbortTraining) -> None:
        assert self.training is not None
        assert self.training.assignment.lease == command.lease

    @perform.register
    def _(self, command: commands.StartWorker) -> None:
        assert self.training is None
        self.is_starting_worker = True

    @perform.register
    def _(self, command: commands.EndWorker) -> None:
        assert self.training is not None or self.is_starting_worker, "ended for nothing"

    @perform.register
    def _(self, command: commands.SendUpdate) -> None:
        assert self.session.is_connected
        self.uploading[command.assignment.lease] = command.update

    @perform.register
    def _(self, command: commands.StopUpload) -> None:
        self.uploading.pop(command.lease, None)

    @perform.register
    def _(self, command: commands.HandBack) -> None:
        job = self.jobs[command.lease.job_id]
        if job.assignment is not None and job.assignment.lease == command.lease:
            job.assignment = None

    @perform.register
    def _(self, command: commands.DeleteJobState) -> None:
        writing = self.training.assignment.lease.job_id if self.training else None
        assert writing != command.job_id, "deleted under the worker's hands"
        self.disk = {key: sent for key, sent in self.disk.items() if key[0] != command.job_id}

    @perform.register
    def _(self, command: commands.Leave) -> None:
        self.has_left = True

    def finish_training(self) -> TrainedUpdate:
        """What the worker makes of its request, on disk before it says so."""
        assert self.training is not None
        lease, start = self.training.assignment.lease, self.training.start
        self.numbers += 1
        name = Digest(f"update-{self.numbers}")
        residual, gained = 0, 0
        lineage: tuple[Digest, ...] = ()
        if start.resume_from is not None:
            origin = self.disk[lease.job_id, start.resume_from]
            residual = origin.residual + origin.message * start.returns_update
            gained, lineage = origin.gained, origin.lineage
        mass = residual + GAIN
        made = Sent(name, mass % 7, mass - mass % 7, gained + GAIN, (*lineage, name))
        self.disk[lease.job_id, lease.round] = made
        arrived = sum(self.accepted.get(earlier, 0) for earlier in made.lineage)
        assert made.residual + made.message + arrived == made.gained, "mass was lost or doubled"
        return TrainedUpdate(name, Bytes(made.message), inner_steps=1, samples=Samples(1))

    def drawn_up(self, job: AssignedJob) -> Assignment:
        """The next assignment of a job under a new lease."""
        self.numbers += 1
        ranges = (SampleRange(job.start, Samples(1)),)
        task = Task(
            workload="null",
            workload_version=1,
            inner_steps=1,
            batch_size=1,
            learning_rate=1.0,
            codec="int4",
            seed=job.round,
            ranges=ranges,
            model=BlobRef(Digest(f"model-{job.round}"), Bytes(1)),
            layout=Digest("layout"),
        )
        job.assignment = Assignment(
            lease=Lease(job.job_id, job.round, self.numbers),
            slot=Slot(0),
            task=task,
            last_accepted=job.last_accepted,
        )
        return job.assignment

    def is_current(self, lease: Lease) -> bool:
        """Whether the coordinator would take an update under this lease."""
        job = self.jobs[lease.job_id]
        return job.assignment is not None and job.assignment.lease == lease

    def accept(self, lease: Lease) -> None:
        """The update is durable; the node may or may not come to hear of it."""
        job = self.jobs[lease.job_id]
        update = self.uploading[lease]
        assert update.digest not in self.accepted, "accepted twice"
        assert self.disk[lease.job_id, lease.round].name == update.digest, "sent is not on disk"
        self.accepted[update.digest] = update.size_bytes
        job.last_accepted, job.assignment = update.digest, None

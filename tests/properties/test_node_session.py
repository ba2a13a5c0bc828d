"""The node's real machine with a coordinator, a disk and a worker as small as can be."""

from collections.abc import Callable
from functools import singledispatchmethod

import msgspec
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from gpu_node.core import commands, events
from gpu_node.core.events import NodeEvent, Timer, TrainedUpdate
from gpu_node.core.memory import Memory
from gpu_node.core.session import transition
from gpu_node.core.session_state import RESTARTS_MAX, Idle, LinkPhase, NodeSession
from hypergpu.assignment import Assignment, Lease, SampleRange, Task
from hypergpu.blobs import BlobRef
from hypergpu.ids import Digest, JobId, NodeId, Slot
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
        self.session, state = transition(self.session, make(Milliseconds(self.now_ms)))
        if self.session.memory is not before:
            self.persisted = msgspec.json.decode(
                msgspec.json.encode(self.session.memory), type=Memory
            )
        for command in state:
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
    def _(self, command: commands.StopTransfer) -> None:
        self.fetching = [lease for lease in self.fetching if lease != command.lease]
        self.uploading.pop(command.lease, None)

    @perform.register
    def _(self, command: commands.StartTraining) -> None:
        assert self.training is None, "two trainings at once"
        job_id = command.assignment.lease.job_id
        self.disk = {
            (job, number): sent_update
            for (job, number), sent_update in self.disk.items()
            if job != job_id or number in command.kept_rounds
        }
        if (resumed_round := command.start.resume_from) is not None:
            origin = self.disk[job_id, resumed_round]
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
    def _(self, command: commands.HandBack) -> None:
        job = self.jobs[command.lease.job_id]
        if job.assignment is not None and job.assignment.lease == command.lease:
            job.assignment = None

    @perform.register
    def _(self, command: commands.DeleteJobState) -> None:
        writing_job = self.training.assignment.lease.job_id if self.training else None
        assert writing_job != command.job_id, "deleted under the worker's hands"
        self.disk = {
            key: sent_update for key, sent_update in self.disk.items() if key[0] != command.job_id
        }

    @perform.register
    def _(self, command: commands.Leave) -> None:
        self.has_left = True

    def finish_training(self) -> TrainedUpdate:
        """What the worker makes of its request, on disk before it says so."""
        assert self.training is not None
        lease, start = self.training.assignment.lease, self.training.start
        self.numbers += 1
        name = Digest(f"update-{self.numbers}")
        residual, gained_mass = 0, 0
        lineage: tuple[Digest, ...] = ()
        if start.resume_from is not None:
            origin = self.disk[lease.job_id, start.resume_from]
            residual = origin.residual + origin.message * start.returns_update
            gained_mass, lineage = origin.gained, origin.lineage
        mass = residual + GAIN
        sent_update = Sent(name, mass % 7, mass - mass % 7, gained_mass + GAIN, (*lineage, name))
        self.disk[lease.job_id, lease.round] = sent_update
        arrived_mass = sum(self.accepted.get(earlier, 0) for earlier in sent_update.lineage)
        assert sent_update.residual + sent_update.message + arrived_mass == sent_update.gained, (
            "mass was lost or doubled"
        )
        return TrainedUpdate(name, Bytes(sent_update.message), inner_steps=1, samples=Samples(1))

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


JOBS = st.sampled_from(["job-a", "job-b"]).map(JobId)


class NodeMachine(RuleBasedStateMachine):
    """The node under every order of assignments, breaks, deaths, refusals and restarts."""

    def __init__(self) -> None:
        super().__init__()
        self.world = NodeWorld()
        self.start()

    def start(self) -> None:
        self.world.happen(lambda ms: events.Started(at_ms=ms, has_certificate=True))

    def job(self, job_id: JobId) -> AssignedJob:
        return self.world.jobs[job_id]

    def assign(self, job: AssignedJob) -> None:
        assignment = self.world.drawn_up(job)
        if self.world.session.is_connected:
            self.say_again(assignment)

    def say_again(self, assignment: Assignment) -> None:
        self.world.happen(lambda ms: events.ShardAssigned(at_ms=ms, assignment=assignment))

    @rule(job_id=JOBS, rounds=st.integers(1, 4))
    def next_round(self, job_id: JobId, rounds: int) -> None:
        job = self.job(job_id)
        job.round += rounds
        self.assign(job)

    @precondition(lambda self: any(job.assignment for job in self.world.jobs.values()))
    @rule(job_id=JOBS, moves_shard=st.booleans())
    def assign_again(self, *, job_id: JobId, moves_shard: bool) -> None:
        job = self.job(job_id)
        if job.assignment is not None:
            job.start += moves_shard
            self.assign(job)

    @rule(job_id=JOBS)
    def repeat_assignment(self, job_id: JobId) -> None:
        owed_assignment = self.job(job_id).assignment
        if owed_assignment is not None and self.world.session.is_connected:
            self.say_again(owed_assignment)

    @rule(job_id=JOBS)
    def cancel(self, job_id: JobId) -> None:
        job = self.job(job_id)
        owed_assignment, job.assignment = job.assignment, None
        if owed_assignment is not None and self.world.session.is_connected:
            self.world.happen(
                lambda ms: events.ShardCancelled(at_ms=ms, lease=owed_assignment.lease, reason="")
            )

    @rule(job_id=JOBS)
    def close_round(self, job_id: JobId) -> None:
        self.job(job_id).assignment = None

    @rule(job_id=JOBS)
    def release(self, job_id: JobId) -> None:
        if self.world.session.is_connected:
            self.job(job_id).assignment = None
            self.world.happen(lambda ms: events.JobReleased(at_ms=ms, job_id=job_id, reason="over"))

    @precondition(lambda self: self.world.is_dialling)
    @rule()
    def connect(self) -> None:
        self.world.is_dialling = False
        working_leases = {
            work.lease for work in (self.world.session.current, *self.world.session.queue) if work
        }
        self.world.happen(lambda ms: events.Connected(at_ms=ms))
        for job in self.world.jobs.values():
            if job.assignment is not None and job.assignment.lease not in working_leases:
                self.say_again(job.assignment)

    @rule()
    def lose_link(self) -> None:
        self.world.is_dialling = False
        self.world.happen(lambda ms: events.LinkLost(at_ms=ms, reason="reset"))

    def fire(self, timer: events.Timer) -> None:
        self.world.happen(lambda ms: events.TimerFired(at_ms=ms, timer=timer))

    @precondition(lambda self: self.world.timers)
    @rule()
    def fire_timers(self) -> None:
        due, self.world.timers = self.world.timers, {}
        for timer, at_ms in sorted(due.items(), key=lambda item: item[1]):
            self.world.now_ms = max(self.world.now_ms, at_ms)
            self.fire(timer)

    @precondition(lambda self: self.world.fetching)
    @rule(
        outcome=st.sampled_from(
            [events.InputsFetched, events.InputsFetched, events.FetchBroken, events.FetchRejected]
        )
    )
    def end_fetch(self, outcome: type) -> None:
        lease = self.world.fetching.pop(0)
        fields = {} if outcome is events.InputsFetched else {"reason": "reset"}
        self.world.happen(lambda ms: outcome(at_ms=ms, lease=lease, **fields))

    @precondition(lambda self: self.world.training)
    @rule()
    def finish_training(self) -> None:
        assert self.world.training is not None
        lease, update = self.world.training.assignment.lease, self.world.finish_training()
        self.world.training = None
        self.world.happen(lambda ms: events.TrainingFinished(at_ms=ms, lease=lease, update=update))

    @precondition(lambda self: self.world.training)
    @rule(fails=st.booleans())
    def drop_training(self, *, fails: bool) -> None:
        assert self.world.training is not None
        lease, self.world.training = self.world.training.assignment.lease, None
        if fails:
            self.world.happen(
                lambda ms: events.TrainingFailed(at_ms=ms, lease=lease, reason="no memory")
            )
        else:
            self.world.happen(lambda ms: events.TrainingAborted(at_ms=ms, lease=lease))

    @precondition(lambda self: self.world.training)
    @rule(steps_done=st.integers(0, 9))
    def progress(self, steps_done: int) -> None:
        assert self.world.training is not None
        lease = self.world.training.assignment.lease
        self.world.happen(
            lambda ms: events.TrainingProgressed(at_ms=ms, lease=lease, steps_done=steps_done)
        )

    @precondition(lambda self: self.world.training)
    @rule(has_written=st.booleans(), was_ready=st.booleans())
    def kill_worker(self, *, has_written: bool, was_ready: bool) -> None:
        if has_written and was_ready:
            self.world.finish_training()
        self.world.training = None
        self.world.happen(
            lambda ms: events.WorkerDied(at_ms=ms, reason="signal 9", was_ready=was_ready)
        )

    @precondition(lambda self: self.world.training)
    @rule()
    def fail_to_start_until_given_up_on(self) -> None:
        for _ in range(RESTARTS_MAX + 1):
            if self.world.training is not None:
                self.kill_worker(has_written=False, was_ready=False)
            self.fire_timers()

    @precondition(lambda self: self.world.is_starting_worker)
    @rule(succeeds=st.booleans())
    def start_worker(self, *, succeeds: bool) -> None:
        self.world.is_starting_worker = False
        if succeeds:
            self.world.happen(lambda ms: events.WorkerReady(at_ms=ms))
        else:
            self.world.happen(
                lambda ms: events.WorkerDied(at_ms=ms, reason="driver", was_ready=False)
            )

    @precondition(lambda self: self.world.uploading)
    @rule(is_heard=st.booleans())
    def answer_upload(self, *, is_heard: bool) -> None:
        lease, update = next(iter(self.world.uploading.items()))
        is_known = update.digest in self.world.accepted
        if not is_known and not self.world.is_current(lease):
            del self.world.uploading[lease]
            self.world.happen(lambda ms: events.UploadLate(at_ms=ms, lease=lease, reason="closed"))
            return
        if not is_known:
            self.world.accept(lease)
        del self.world.uploading[lease]
        if is_heard:
            self.world.happen(lambda ms: events.UploadAccepted(at_ms=ms, lease=lease))
        else:
            self.world.happen(lambda ms: events.UploadBroken(at_ms=ms, lease=lease, reason="reset"))

    @rule()
    def restart_daemon(self) -> None:
        self.world.restart()
        self.start()

    @invariant()
    def the_worker_is_known_to_be_busy_when_it_is(self) -> None:
        training, busy = self.world.training, self.world.session.worker.busy
        assert (training.assignment.lease if training else None) == busy

    @invariant()
    def nothing_waits_while_the_node_is_idle(self) -> None:
        session = self.world.session
        assert not (isinstance(session.work, Idle) and session.queue)

    @invariant()
    def an_unhealthy_node_holds_nothing_and_is_about_to_start_a_worker(self) -> None:
        session = self.world.session
        if session.unhealthy:
            assert isinstance(session.work, Idle)
            assert self.world.is_starting_worker or session.worker.retry_at_ms

    def teardown(self) -> None:
        """Left in peace, the node ends whatever it was given; then it drains and leaves."""
        for _ in range(200):
            self.settle()
        assert not self.world.session.unhealthy
        assert isinstance(self.world.session.work, Idle)
        assert all(job.assignment is None for job in self.world.jobs.values())
        self.world.happen(lambda ms: events.DrainRequested(at_ms=ms, reason="SIGTERM"))
        assert self.world.has_left
        assert self.world.session.link.phase is LinkPhase.LEFT

    def settle(self) -> None:
        """One step towards the end, whichever is possible."""
        world = self.world
        if world.is_dialling:
            self.connect()
        elif world.fetching:
            self.end_fetch(events.InputsFetched)
        elif world.training:
            self.finish_training()
        elif world.uploading:
            self.answer_upload(is_heard=True)
        elif world.is_starting_worker:
            self.start_worker(succeeds=True)
        elif world.timers:
            self.fire_timers()


TestNodeMachine = NodeMachine.TestCase
TestNodeMachine.settings = settings(max_examples=150, stateful_step_count=40)

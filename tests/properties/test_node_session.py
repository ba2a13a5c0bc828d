from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from gpu_node.core import events
from gpu_node.core.state import RESTARTS_MAX, Idle, LinkPhase
from hypergpu.ids import JobId
from hypergpu.statements.assignment import Assignment
from tests.properties.node_world import AssignedJob, NodeWorld

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
        owed = self.job(job_id).assignment
        if owed is not None and self.world.session.is_connected:
            self.say_again(owed)

    @rule(job_id=JOBS)
    def cancel(self, job_id: JobId) -> None:
        job = self.job(job_id)
        owed, job.assignment = job.assignment, None
        if owed is not None and self.world.session.is_connected:
            self.world.happen(
                lambda ms: events.ShardCancelled(at_ms=ms, lease=owed.lease, reason="")
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
        working = {
            held.lease for held in (self.world.session.current, *self.world.session.queue) if held
        }
        self.world.happen(lambda ms: events.Connected(at_ms=ms))
        for job in self.world.jobs.values():
            if job.assignment is not None and job.assignment.lease not in working:
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

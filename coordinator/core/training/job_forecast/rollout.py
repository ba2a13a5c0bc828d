"""Rolls a job forward: its own round machine and its own plans, on nodes as they are forecast."""

from collections.abc import Callable
from functools import partial
from heapq import heappop, heappush
from itertools import count

from msgspec.structs import replace

from coordinator.core.network.work_forecast import RoundWork
from coordinator.core.training.job import commands, events
from coordinator.core.training.job.chain import extend_chain
from coordinator.core.training.job.commands import Command
from coordinator.core.training.job.state import ENDED, AcceptedUpdate, Job, Model, Phase
from coordinator.core.training.job_forecast.basis import ForecastBasis, RolloutPoint
from coordinator.core.training.job_forecast.node_course import (
    AbsenceRates,
    Absences,
    absence_moments,
    job_factor,
    node_courses,
)
from coordinator.core.training.outstanding import outstanding
from coordinator.core.training.plan.decision import PlanRequest
from coordinator.core.training.plan.planning import plan_round
from coordinator.core.training.transition import rejection, transition
from coordinator.core.work import work_events
from hypergpu.assignment import Assignment, Delta
from hypergpu.blobs import BlobRef
from hypergpu.digests import digest_of
from hypergpu.ids import Digest, JobId, NodeId
from hypergpu.jobfile.spec import JobSpec
from hypergpu.units import Bytes, Milliseconds, Samples

_NOW = Milliseconds(0)
_LONGEST_MS = 10 * 365 * 86_400_000
_NEW_JOB = JobId("job-forecast")
_PARTITION = Samples(100_000)
_LOST = "silent"


class JobRollout:
    """One way that a job may go.

    Args:
        basis: What is known.
        draw: What all chance in it follows from.
        rates: How often nodes are away.
        share: In which share of cases all work takes no longer than here, in (0, 1).
    """

    def __init__(self, basis: ForecastBasis, draw: str, rates: AbsenceRates, share: float) -> None:
        self._basis = basis
        self._draw = draw
        # Who is away now is planned with once it is back.
        self._beliefs = {
            node: replace(each, is_present=True) for node, each in basis.readings.items()
        }
        self._courses = node_courses(self._beliefs, draw)
        self._factor = job_factor(share)
        self._rates = rates
        self._agenda: list[tuple[int, int, Callable[[], object]]] = []
        self._numbers = count()
        self._at_ms = int(basis.now_ms)
        self._job: Job | None = None
        self._present = {node for node, mine in basis.readings.items() if mine.is_present}
        self._models: dict[NodeId, Digest] = {}
        self._finishes_ms: dict[NodeId, tuple[int, int]] = {}
        """Lease and end of what each node is at."""
        self._unsent: dict[NodeId, Callable[[], None]] = {}
        """Updates of nodes that are away."""
        self._bytes_down = Bytes(0)
        self.points: list[RolloutPoint] = []
        """One at each new model."""

    @property
    def job(self) -> Job:
        """The job as it is now."""
        if self._job is None:
            raise AssertionError("the job was not begun")
        return self._job

    def begin(self, job: Job | None) -> None:
        """Begin with a job as it is; None: a new one of the basis' spec."""
        if job is None:
            self._create()
        else:
            self._job = replace(job, spec=_without_target(job.spec), next_spec=None)
            for command in outstanding(self._job):
                self._perform(command)
        for node in self._beliefs:
            moments = absence_moments(node, self._rates, self._draw)
            self._plan_absence(node, moments)

    def run(self, rounds_most: int) -> bool:
        """Go on for so many new models, or to the job's end. Whether it comes to one."""
        while self._agenda and len(self.points) < rounds_most and self.job.phase not in ENDED:
            self._at_ms, _, act = heappop(self._agenda)
            if self._at_ms > _LONGEST_MS:
                return False
            act()
        return self.job.phase in ENDED or len(self.points) >= rounds_most

    @property
    def at_ms(self) -> Milliseconds:
        """Its clock."""
        return Milliseconds(self._at_ms)

    def _create(self) -> None:
        creation = events.JobCreated(
            at_ms=self.at_ms, job_id=_NEW_JOB, spec=_without_target(self._basis.spec)
        )
        self._job, todo = transition(None, creation)
        for node in self._beliefs:
            if node in self._present:
                self._apply(work_events.NodeJoined(at_ms=_NOW, node=node))
        for command in todo:
            self._perform(command)

    def _after(self, wait_ms: float, act: Callable[[], object]) -> None:
        at_ms = self._at_ms + max(0, round(wait_ms))
        heappush(self._agenda, (at_ms, next(self._numbers), act))

    def _apply_after(self, wait_ms: float, event: events.Event) -> None:
        self._after(wait_ms, partial(self._apply, event))

    def _apply(self, event: events.Event) -> bool:
        event = replace(event, at_ms=Milliseconds(self._at_ms))
        before = self.job
        if rejection(before, event):
            return False
        self._job, todo = transition(before, event)
        for command in todo:
            self._perform(command)
        return True

    def _perform(self, command: Command) -> None:
        times = self._basis.times
        match command:
            case commands.InitialiseModel():
                self._apply_after(times.prepare_ms, self._first_model())
            case commands.PlanRound(request=request):
                request = replace(
                    request,
                    paused=self._basis.paused,
                    line_bits_per_s=self._basis.line_bits_per_s,
                )
                self._after(times.plan_ms, lambda: self._plan(request))
            case commands.AssignShard(node=node, assignment=assignment):
                self._assign(node, assignment)
            case commands.SetDeadline(round=number, at_ms=at_ms):
                wait_ms = at_ms - self._at_ms
                self._apply_after(wait_ms, events.DeadlineReached(at_ms=_NOW, round=number))
            case commands.Aggregate():
                self._after(times.aggregate_ms, lambda: self._aggregate(command))
            case commands.EvaluateModel(round=number, model=model):
                self._apply_after(times.evaluate_ms, _evaluation(number, model))
            case _:
                pass

    def _plan(self, request: PlanRequest) -> None:
        if self.job.phase is Phase.PLANNING:
            plan = plan_round(request, self._beliefs, self._basis.sizes)
            self._apply(events.RoundPlanned(at_ms=_NOW, plan=plan))

    def _first_model(self) -> events.ModelInitialised:
        spec = self._basis.spec
        partitions = 1
        if spec.data.sharding == "dirichlet":
            partitions = spec.data.partitions or spec.training.nodes
        first = Model(0, BlobRef(digest_of(b"first"), self._basis.sizes.model_bytes))
        return events.ModelInitialised(
            at_ms=_NOW,
            model=first,
            partition_sizes=(_PARTITION,) * partitions,
            is_evaluated=True,
        )

    def _assign(self, node: NodeId, assignment: Assignment) -> None:
        """Let a node do its work, from when it was given out."""
        course = self._courses.get(node)
        if course is None or node not in self._present:
            return
        participant = self.job.participant(node)
        begun_ms = participant.assigned_at_ms if participant is not None else self._at_ms
        task = assignment.task
        down_bytes = self._missing_bytes(node, assignment)
        early_steps = task.prefetched.inner_steps if task.prefetched is not None else 0
        work = RoundWork(
            inner_steps=task.full_steps * (1 - early_steps / task.inner_steps),
            up_bytes=self._basis.sizes.update_bytes[task.codec],
            down_bytes=down_bytes,
            connections=assignment.connections,
        )
        self._bytes_down = Bytes(self._bytes_down + down_bytes)
        self._models[node] = task.model.digest
        took_ms = self._factor * course.finish_ms(work) + assignment.upload_after_ms
        # What should be in by now may come at any moment.
        end_ms = max(begun_ms + round(took_ms), self._at_ms + 1)
        self._finish_at(node, assignment, end_ms)

    def _finish_at(self, node: NodeId, assignment: Assignment, end_ms: int) -> None:
        lease, task = assignment.lease, assignment.task
        self._finishes_ms[node] = (lease.number, end_ms)
        name = f"{self._draw}/{node}/{lease.number}".encode()
        blob = BlobRef(digest_of(name), self._basis.sizes.update_bytes[task.codec])
        receipt = events.UpdateReceived(
            at_ms=_NOW,
            node=node,
            round=lease.round,
            lease=lease.number,
            update=AcceptedUpdate(blob, task.samples, task.inner_steps),
        )

        def finish() -> None:
            if self._finishes_ms.get(node) != (lease.number, end_ms):
                return
            if node not in self._present:
                self._unsent[node] = finish
            elif self._apply(receipt):
                self._beliefs[node] = self._courses[node].reading

        self._after(end_ms - self._at_ms, finish)

    def _missing_bytes(self, node: NodeId, assignment: Assignment) -> Bytes:
        """What the node fetches: deltas from the model that it has, or all of one."""
        model, initial = assignment.task.model, assignment.initial
        held_models = {self._models.get(node), initial.digest if initial else None}
        if model.digest in held_models:
            return Bytes(0)
        places = [at for at, delta in enumerate(assignment.deltas) if delta.base in held_models]
        if not places:
            return model.size_bytes
        led_on = sum(delta.blob.size_bytes for delta in assignment.deltas[places[-1] :])
        return min(model.size_bytes, Bytes(led_on))

    def _aggregate(self, command: commands.Aggregate) -> None:
        base, sizes = command.base, self._basis.sizes
        digest = digest_of(f"{self._draw}/{base.blob.digest}".encode())
        blob = BlobRef(digest, sizes.model_bytes)
        difference = Delta(
            base.blob.digest, BlobRef(digest, sizes.update_bytes[command.down]), command.down
        )
        deltas = () if command.down == "fp32" else extend_chain(base, difference, blob.size_bytes)
        moved_bytes, self._bytes_down = self._bytes_down, Bytes(0)
        is_drawn = self.job.spec.trust.duplicates == "secret"
        ready = events.AggregateReady(
            at_ms=_NOW,
            round=command.round,
            model=Model(base.round + 1, blob, deltas=deltas),
            bytes_down=moved_bytes,
            draw=f"{self._draw}/{command.round}" if is_drawn else "",
        )
        if self._apply(ready):
            self.points.append(self._point())

    def _point(self) -> RolloutPoint:
        job = self.job
        tally = job.tally
        return RolloutPoint(
            self.at_ms,
            tally.samples,
            tally.samples_twice,
            job.newest_model.round,
            tally.bytes_up,
            tally.bytes_down,
        )

    def _plan_absence(self, node: NodeId, moments: Absences) -> None:
        wait_ms, away_ms = next(moments)
        if node not in self._present:
            self._after(away_ms, lambda: self._come_back(node, moments))
            return
        self._after(wait_ms, lambda: self._go(node, away_ms, moments))

    def _go(self, node: NodeId, away_ms: float, moments: Absences) -> None:
        """The node is gone for a while. It goes on with what it is at, until that is taken away."""
        self._present.discard(node)
        self._after(away_ms, lambda: self._come_back(node, moments))
        if away_ms > self._basis.lost_after_ms:
            self._finishes_ms.pop(node, None)
            loss_event = work_events.NodeLost(at_ms=_NOW, node=node, reason=_LOST)
            self._apply_after(self._basis.lost_after_ms, loss_event)

    def _come_back(self, node: NodeId, moments: Absences) -> None:
        self._present.add(node)
        member = self.job.members.get(node)
        if member is None or not member.is_present:
            self._apply(work_events.NodeJoined(at_ms=_NOW, node=node))
        else:
            self._take_up(node)
        self._plan_absence(node, moments)

    def _take_up(self, node: NodeId) -> None:
        """Send what is finished; begin what was given out meanwhile."""
        send = self._unsent.pop(node, None)
        if send is not None:
            send()
        lease_number, _ = self._finishes_ms.get(node, (0, 0))
        for command in outstanding(self.job):
            if not isinstance(command, commands.AssignShard) or command.node != node:
                continue
            if command.assignment.lease.number != lease_number:
                self._assign(node, command.assignment)


def _without_target(spec: JobSpec) -> JobSpec:
    """The job to its stated end: nobody knows what its model will be worth."""
    return replace(spec, evaluation=replace(spec.evaluation, target=0.0))


def _evaluation(number: int, model: Model) -> events.EvaluationReady:
    return events.EvaluationReady(
        at_ms=_NOW, round=number, model=model.blob.digest, loss=0.0, metric=0.0, metric_name=""
    )

"""Runs a world: the real cores of coordinator and nodes on virtual time, checked as they go.

The world's timeline of faults and churn is carried out here, too.
"""

import gc
import random
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from itertools import chain

import msgspec
from msgspec.structs import replace

from coordinator.core.training.job import events
from coordinator.core.training.job.state import ENDED, Job, Phase
from coordinator.core.training.job_forecast.basis import ForecastBasis
from coordinator.core.training.job_forecast.node_course import expected_nodes
from gpu_node.core import events as node_events
from hypergpu.ids import Address, Digest, JobId, NodeId
from hypergpu.jobfile.spec import JobSpec
from hypergpu.ledger_terms import Domain, terms_of
from hypergpu.units import Milliseconds, Samples
from netsim.link import LinkCourse
from netsim.network.timeline import ActionKind, WorldAction, timeline
from netsim.network.world import (
    COORDINATOR,
    CorruptFault,
    LieFault,
    NodeDescription,
    SilentFault,
    SlowDeviceFault,
    SlowDiskFault,
    WorldDescription,
    WorldFault,
)
from netsim.virtual.coordinator_actor import (
    LOST_AFTER_MS,
    MODEL_BYTES_PER_S,
    CoordinatorActor,
    journal_digest,
)
from netsim.virtual.invariants import step_violations, violations
from netsim.virtual.node_actor import NodeActor, NodeFaults, VirtualDevice
from netsim.virtual.node_link import CoordinatorLine, NodeLink, NodeMeasurements
from netsim.virtual.sharing import Agenda, AgendaCallback
from netsim.virtual.worlds import SimulatedWorld, SpeedLie, drawn_description

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
            node.faults = replace(node.faults, disk_bytes_per_s=0 if is_over else rate)
        case CorruptFault(percent=percent):
            node.faults = replace(node.faults, corruption=0.0 if is_over else percent / 100)
        case LieFault(factor=factor):
            node.faults = replace(node.faults, lie=1.0 if is_over else factor)
        case SilentFault():
            node.faults = replace(node.faults, is_silent=not is_over)
        case _:
            pass


_RESUME_EACH_MS = 60_000
_COORDINATOR = Address("0x" + "c0" * 20)


class NodeTransfers(msgspec.Struct, frozen=True):
    """Durations of one node's completed transfers, in milliseconds, in order."""

    downloads_ms: tuple[int, ...]
    uploads_ms: tuple[int, ...]


class WorldOutcome(msgspec.Struct, frozen=True):
    """The result of a world."""

    seed: int
    violations: tuple[str, ...]
    phases: dict[JobId, Phase]
    reasons: dict[JobId, str]
    """Why a job is in its phase."""
    journals: dict[JobId, Digest]
    models: dict[JobId, Digest | None]
    rounds: int
    callbacks: int
    virtual_ms: Milliseconds
    round_ms: dict[JobId, tuple[int, ...]]
    """How long each round took, as the journal has it: from its opening to its model."""
    transfers: dict[NodeId, NodeTransfers]
    rejected: dict[JobId, int]
    """Updates that the coordinator rejected."""
    accepted: dict[NodeId, int]
    """Updates of each node that it accepted; nodes without any are left out."""
    samples: dict[JobId, Samples]
    """Samples of accepted updates, each counted once."""


@contextmanager
def _collector_paused() -> Iterator[None]:
    """Keep Python from looking for circles among the millions of objects of a large world.

    It took a fifth of the time and found next to nothing: states are replaced, not linked.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class _BrokenError(Exception):
    """An invariant does not hold."""


class Simulation:
    """One world in motion."""

    def __init__(self, world: SimulatedWorld) -> None:
        self._world = world
        self._description = world.description or drawn_description(world)
        self._dice = random.Random(world.seed)
        self._agenda = Agenda()
        self._open_jobs = len(world.jobs)
        self._is_begun = False
        self._first_late = len(self._description.nodes) - world.late_nodes
        self._model_ms = world.sizes.whole * 1000 // MODEL_BYTES_PER_S
        measurements = NodeMeasurements(
            self._agenda,
            world.sizes.for_plans(),
            seed=world.seed,
            line_bits_per_s=self._description.coordinator.down.bits_per_s,
        )
        self._coordinator = CoordinatorActor(self._agenda, measurements, world.sizes, self._watch)
        self._coordinator.model_ms = self._model_ms
        self._line = CoordinatorLine(self._agenda, self._description.coordinator)
        self._nodes = [self._node(each) for each in self._description.nodes]
        self._script = FaultScript(self._agenda, self._description, self._coordinator, self._nodes)

    def run(self) -> WorldOutcome:
        """Run to the end of every job, or until an invariant or the time limit breaks. Called
        again once further jobs are submitted, it goes on.
        """
        if not self._is_begun:
            self._begin()
        failures: tuple[str, ...] = ()
        try:
            with _collector_paused():
                is_over = self._agenda.run(self._is_over, self._world.limit_ms)
            if not is_over:
                failures = (f"never finished: {self._where()}",)
        except (_BrokenError, AssertionError) as error:
            failures = (str(error),)
        jobs = self._coordinator.jobs
        return WorldOutcome(
            seed=self._world.seed,
            violations=failures,
            phases={job_id: job.phase for job_id, job in jobs.items()},
            reasons={job_id: job.reason for job_id, job in jobs.items()},
            journals={
                job_id: journal_digest(journal)
                for job_id, journal in self._coordinator.journals.items()
            },
            models={
                job_id: job.model.blob.digest if job.model else None for job_id, job in jobs.items()
            },
            rounds=sum(job.model.round for job in jobs.values() if job.model),
            callbacks=self._agenda.done,
            virtual_ms=self._agenda.now_ms,
            round_ms={
                job_id: tuple(record.duration_ms for record in records)
                for job_id, records in self._coordinator.rounds.items()
            },
            transfers={
                node.node: NodeTransfers(tuple(node.downloads_ms), tuple(node.uploads_ms))
                for node in self._nodes
            },
            rejected={job_id: job.tally.updates_rejected for job_id, job in jobs.items()},
            accepted=dict(self._accepted_updates()),
            samples={job_id: job.tally.samples for job_id, job in jobs.items()},
        )

    def _accepted_updates(self) -> Counter[NodeId]:
        journalled_events = chain.from_iterable(self._coordinator.journals.values())
        return Counter(
            event.node for event in journalled_events if isinstance(event, events.UpdateReceived)
        )

    def submit(self, spec: JobSpec) -> JobId:
        """Submit one more job, now."""
        number = len(self._coordinator.jobs)
        self._open_jobs += number >= len(self._world.jobs)
        job_id = JobId(f"job-{number}")
        self._coordinator.create_job(
            events.JobCreated(
                at_ms=self._agenda.now_ms,
                job_id=job_id,
                spec=spec,
                terms=terms_of(_COORDINATOR, job_id, Domain()),
            )
        )
        return job_id

    def start_late_nodes(self, wait_ms: Milliseconds) -> None:
        """Start the nodes that were not to be there from the beginning, and pass some time."""
        for node in self._nodes[self._first_late :]:
            self._start(node)
        self.pass_time(wait_ms)

    def pass_time(self, time_ms: Milliseconds) -> bool:
        """Run for so long, or to the end of every job. Whether some job has not ended."""
        until_ms = self._agenda.now_ms + time_ms
        self._agenda.after(time_ms, lambda: None)
        had_jobs = not self._is_over()
        self._agenda.run(
            lambda: self._agenda.now_ms >= until_ms or (had_jobs and self._is_over()),
            self._world.limit_ms,
        )
        return not self._is_over()

    @property
    def now_ms(self) -> Milliseconds:
        """Virtual time."""
        return self._agenda.now_ms

    def forecast_basis(self, spec: JobSpec) -> ForecastBasis:
        """What the coordinator knows that a forecast of a job may be made of."""
        return ForecastBasis(
            spec=spec,
            readings=expected_nodes(self._coordinator.readings(), self._agenda.now_ms),
            sizes=self._world.sizes.for_plans(),
            times=self._coordinator.times,
            now_ms=self._agenda.now_ms,
            lost_after_ms=Milliseconds(LOST_AFTER_MS),
        )

    @property
    def job_states(self) -> dict[JobId, Job]:
        """Every job as it is now."""
        return self._coordinator.jobs

    @property
    def rounds(self) -> dict[JobId, list[events.RoundRecorded]]:
        """Records of each job's rounds."""
        return self._coordinator.rounds

    @property
    def journals(self) -> dict[JobId, list[events.Event]]:
        """Every job's journal so far."""
        return self._coordinator.journals

    def _node(self, described: NodeDescription) -> NodeActor:
        key = partial(self._description.key, entity=described.name)
        course = LinkCourse(described.shape, key=key("link"))
        link = NodeLink(self._agenda, course, random.Random(key("transfers")), self._line)
        dice = random.Random(key("node"))
        node = NodeActor(NodeId(described.name), self._agenda, self._coordinator, link, dice)
        node.step_ms = max(described.step_floor_ms, dice.randint(*self._world.step_ms))
        node.sizes = self._world.sizes
        node.model_ms = self._model_ms
        node.faults = NodeFaults(worker_death=self._world.faults.worker_death)
        node.speed_lie = self._world.speed_lies.get(node.node, SpeedLie())
        node.device = VirtualDevice(described.features, described.micro_batch_max)
        node.starting_ms = self._world.faults.starting_ms
        return node

    def _begin(self) -> None:
        self._is_begun = True
        for spec in self._world.jobs:
            self.submit(spec)
        for node in self._nodes[: self._first_late]:
            self._start(node)
        self._script.plan_next()
        self._plan_fault(self._world.faults.coordinator_crash_ms, self._crash_coordinator)
        self._agenda.after(_RESUME_EACH_MS, self._resume)

    def _start(self, node: NodeActor) -> None:
        self._agenda.after(self._dice.randint(0, 500), node.start)
        self._plan_fault(self._world.faults.link_cut_ms, partial(self._cut, node))
        self._plan_fault(self._world.faults.node_crash_ms, partial(self._crash, node))
        self._plan_fault(self._world.faults.drain_ms, partial(self._drain, node))

    def _plan_fault(self, mean_ms: int, callback: AgendaCallback) -> None:
        """A Poisson process of faults that ends when the world says so."""
        if not mean_ms:
            return
        wait_ms = 1 + int(self._dice.expovariate(1 / mean_ms))

        def strike() -> None:
            callback()
            self._plan_fault(mean_ms, callback)

        if self._agenda.now_ms + wait_ms < self._world.faults_until_ms:
            self._agenda.after(wait_ms, strike)

    def _away_ms(self) -> int:
        return self._dice.randint(1, self._world.faults.away_ms)

    def _cut(self, node: NodeActor) -> None:
        node.unplug("the line went down")
        self._agenda.after(self._away_ms(), node.plug)

    def _crash(self, node: NodeActor) -> None:
        if not node.is_alive:
            return
        node.crash()
        if node is not self._nodes[0] and self._dice.random() < self._world.faults.vanishing:
            return
        self._agenda.after(self._away_ms(), node.revive)

    def _drain(self, node: NodeActor) -> None:
        """Ask a node to leave; its owner starts it again once it has."""
        node.apply(node_events.DrainRequested(at_ms=self._agenda.now_ms, reason="its owner"))
        limit_ms = node.session.drain_limit_ms + self._away_ms()
        self._agenda.after(limit_ms, node.revive)

    def _crash_coordinator(self) -> None:
        away_ms = self._away_ms()
        if self._coordinator.is_up():
            self._coordinator.crash(self._nodes)
            self._agenda.after(away_ms, self._coordinator.restart)

    def _resume(self) -> None:
        """Play the user: resume what paused itself."""
        if self._coordinator.is_up():
            self._coordinator.resumed_if_paused()
        self._agenda.after(_RESUME_EACH_MS, self._resume)

    def _watch(self, before: Job, after: Job) -> None:
        if after.phase in ENDED and before.phase not in ENDED:
            self._open_jobs -= 1
        is_new_model = before.model is not after.model
        if not self._world.checks_each_event and not is_new_model:
            return
        if breaches := (*violations(after), *step_violations(before, after)):
            raise _BrokenError(f"{after.job_id} at {after.at_ms} ms: {'; '.join(breaches)}")

    def _is_over(self) -> bool:
        return self._open_jobs == 0

    def _where(self) -> str:
        paths = [
            f"{job.job_id} is {job.phase.value} ({job.reason})"
            for job in self._coordinator.jobs.values()
            if job.phase is not Phase.FINISHED
        ]
        return ", ".join(paths)

"""The virtual coordinator: the real round machines and allocation, with a shell of virtual time."""

from collections.abc import Callable
from functools import partial

import msgspec
from blake3 import blake3

from coordinator.core.network.reading import NodeReading, Observation, Presence
from coordinator.core.training.available import nodes_needed
from coordinator.core.training.billing import billing_epoch
from coordinator.core.training.job import commands, events
from coordinator.core.training.job.commands import Command
from coordinator.core.training.job.events import Event
from coordinator.core.training.job.state import ENDED, AcceptedUpdate, Job, Model, Phase
from coordinator.core.training.job_forecast.basis import CoordinatorTimes
from coordinator.core.training.outstanding import outstanding
from coordinator.core.training.plan.decision import PlanRequest
from coordinator.core.training.transition import rejection, transition
from coordinator.core.work import work_commands, work_events
from coordinator.core.work.allocation import Lend, plan_allocation
from coordinator.core.work.demand import JobDemand, NodeOffer
from gpu_node.core import events as node_events
from gpu_node.core.commands import HandBack
from gpu_node.core.events import TrainedUpdate
from hypergpu.assignment import FailureCause, Lease
from hypergpu.blobs import BlobRef
from hypergpu.ids import Digest, JobId, NodeId
from hypergpu.units import Bytes, Milliseconds, Samples
from netsim.virtual.node_actor import NodeActor
from netsim.virtual.node_link import NodeMeasurements, simulated_evaluation
from netsim.virtual.sharing import Agenda
from netsim.virtual.worlds import TransferSizes

LOST_AFTER_MS = 15_000
AGGREGATE_MS = 50
"""The last update is checked, folded and journalled. Fitted to rounds of a small model, 0.86 s."""
MODEL_BYTES_PER_S = 25_000_000
"""What a fold, and a node around its training, move of the whole model besides. Fitted to rounds of
500,000 parameters, 1.0 s over 40 ms and 1.9 s over a slow line.
"""
EVALUATE_MS = 200
PLAN_MS = 2
ALLOCATE_MS = 100
_WORKLOAD_VERSION = 1

_NOTHING = TrainedUpdate(Digest(""), Bytes(0), 0, Samples(0))

Watcher = Callable[[Job, Job], None]


class CoordinatorActor:
    """Several jobs over shared nodes. The journal is all that a crash leaves."""

    def __init__(
        self, agenda: Agenda, measurements: NodeMeasurements, sizes: TransferSizes, watcher: Watcher
    ) -> None:
        self.journals: dict[JobId, list[Event]] = {}
        self.jobs: dict[JobId, Job] = {}
        self.rounds: dict[JobId, list[events.RoundRecorded]] = {}
        """How long each closed round took."""
        self.model_ms = 0
        """What the size of the model adds to a fold."""
        self.disk_bytes_per_s = 0
        """Updates are folded and the model is written at this rate; 0: at once."""
        self._agenda = agenda
        self._measurements = measurements
        self._sizes = sizes
        self._watcher = watcher
        self._nodes: dict[NodeId, NodeActor] = {}
        self._lent: dict[NodeId, JobId] = {}
        self._newest_leases: dict[tuple[JobId, NodeId], int] = {}
        self._life = 0
        self._is_up = True
        self._is_allocating = False

    # Messages from nodes.

    def is_up(self) -> bool:
        """Whether the coordinator runs."""
        return self._is_up

    def attach_node(self, node: NodeActor) -> None:
        """Send a known member its work again; find work for anybody else."""
        self._nodes[node.node] = node
        self.observe(node.node, Presence(self._agenda.now_ms, True, node.is_starting))
        job = self._job_of(node.node)
        if job is None or not job.members[node.node].is_present:
            self._allocate_soon()
            return
        for command in outstanding(job):
            if isinstance(command, commands.AssignShard) and command.node == node.node:
                self._perform(job.job_id, command)

    def detach_node(self, node: NodeActor) -> None:
        """Wait for the node to come back before its work is given away."""
        connection = node.connection
        self.observe(node.node, Presence(self._agenda.now_ms, is_present=False))
        self._later(LOST_AFTER_MS, lambda: self._silent(node, connection))

    def admit_update(self, node: NodeId, lease: Lease, update: TrainedUpdate) -> str:
        """Admit an update, or say why not. One that was accepted before is accepted again."""
        job = self.jobs[lease.job_id]
        member = job.members.get(node)
        if (
            member is not None
            and member.accepted_lease == lease.number
            and member.last_accepted == update.digest
        ):
            return ""
        reason = self.apply(lease.job_id, self._update_event(node, lease, update))
        newest = self._newest_leases.get((lease.job_id, node))
        if not reason and newest != lease.number:
            raise AssertionError(f"{node} was let in under lease {lease.number}, not {newest}")
        if not reason:
            self._measurements.note_accepted(job, node)
        return reason

    def observe(self, node: NodeId, observation: Observation) -> None:
        """Something was seen of a node."""
        if self._is_up:
            self._measurements.note(node, observation)

    def readings(self) -> dict[NodeId, NodeReading]:
        """Reading of each node that is or was connected."""
        links = {node: actor.link for node, actor in self._nodes.items() if actor.is_connected}
        return self._measurements.readings_now(links)

    @property
    def times(self) -> CoordinatorTimes:
        """What its own work takes."""
        return CoordinatorTimes(
            prepare_ms=Milliseconds(EVALUATE_MS),
            plan_ms=Milliseconds(PLAN_MS),
            aggregate_ms=Milliseconds(AGGREGATE_MS + self.model_ms),
            evaluate_ms=Milliseconds(EVALUATE_MS),
        )

    def _update_event(
        self, node: NodeId, lease: Lease, update: TrainedUpdate
    ) -> events.UpdateReceived:
        job = self.jobs[lease.job_id]
        work = job.participant(node)
        return events.UpdateReceived(
            at_ms=self._agenda.now_ms,
            node=node,
            round=lease.round,
            lease=lease.number,
            update=AcceptedUpdate(
                BlobRef(update.digest, update.size_bytes),
                Samples(0),
                update.inner_steps,
                # Nodes sign for the epoch that they are told is open.
                epoch=None if work is None else billing_epoch(job, work),
                data_samples=update.data_samples,
            ),
        )

    def reject_damaged(self, node: NodeId, lease: Lease) -> str:
        """Refuse an update whose bytes do not have their digest, and count the refusal."""
        reason = rejection(self.jobs[lease.job_id], self._update_event(node, lease, _NOTHING))
        reason = reason or "the bytes do not have the digest that the header names"
        now_ms = self._agenda.now_ms
        if node in self.jobs[lease.job_id].members:
            event = events.UpdateRejected(at_ms=now_ms, node=node, round=lease.round, reason=reason)
            self.apply(lease.job_id, event)
        return reason

    def take_back(self, node: NodeId, back: HandBack) -> None:
        """Take a shard back."""
        lease, now_ms = back.lease, self._agenda.now_ms
        self.apply(
            lease.job_id,
            events.ShardHandedBack(
                at_ms=now_ms,
                node=node,
                round=lease.round,
                lease=lease.number,
                reason=back.reason,
                lacks_memory=back.cause is FailureCause.OUT_OF_MEMORY,
            ),
        )

    def drain_node(self, node: NodeId, reason: str) -> None:
        """Give the node nothing more."""
        if node in self._lent:
            now_ms = self._agenda.now_ms
            self.apply(
                self._lent[node], work_events.NodeDraining(at_ms=now_ms, node=node, reason=reason)
            )

    # Actions of users and faults.

    def create_job(self, create_job: events.JobCreated) -> None:
        """Take a job on."""
        job_id = create_job.job_id
        self._measurements.is_needed |= create_job.spec.strategy == "aware"
        self.journals[job_id] = [create_job]
        self.rounds[job_id] = []
        self.jobs[job_id], todo = transition(None, create_job)
        for command in todo:
            self._perform(job_id, command)

    def crash(self, nodes: list[NodeActor]) -> None:
        """SIGKILL: states, deadlines and aggregations in flight are gone."""
        if not self._is_up:
            return
        self._is_up = False
        self._life += 1
        for node in nodes:
            node.cut("the coordinator is gone")
        self._nodes.clear()
        self._measurements.forget()

    def restart(self) -> None:
        """Start again from the journals, unless it runs."""
        if self._is_up:
            return
        self._is_up = True
        self._is_allocating = False
        self._lent = {}
        for job_id, journal in self.journals.items():
            job: Job | None = None
            for event in journal:
                job = transition(job, event).job
            if job is None or job != self.jobs[job_id]:
                raise AssertionError(f"the journal of {job_id} does not give its state")
            present = [node for node, member in job.members.items() if member.is_present]
            for node in present:
                self._lent[node] = job_id
                self._later(LOST_AFTER_MS, partial(self._silent_after_restart, node))
        for job_id, job in self.jobs.items():
            for command in outstanding(job):
                self._perform(job_id, command)
        self._allocate_soon()

    def apply(self, job_id: JobId, event: Event) -> str:
        """Decide, persist, act. The refusal when the event is not legal."""
        before = self.jobs[job_id]
        if reason := rejection(before, event):
            return reason
        step = transition(before, event)
        self.journals[job_id].append(event)
        self.jobs[job_id] = step.job
        self._watcher(before, step.job)
        for command in step.commands:
            self._perform(job_id, command)
        if step.job.phase is not before.phase:
            self._allocate_soon()
        return ""

    # Commands of the round machine.

    def _later(self, wait_ms: int, callback: Callable[[], None]) -> None:
        life = self._life
        self._agenda.after(wait_ms, lambda: callback() if self._life == life else None)

    def _perform(self, job_id: JobId, command: Command) -> None:
        match command:
            case commands.AssignShard():
                self._assign(job_id, command)
            case commands.CancelShard(node=node, round=round_, lease=number, reason=reason):
                lease = Lease(job_id, round_, number)
                self._tell(
                    node,
                    lambda at_ms: node_events.ShardCancelled(
                        at_ms=at_ms, lease=lease, reason=reason
                    ),
                )
            case work_commands.ReleaseNode(node=node, reason=reason):
                self._lent.pop(node, None)
                self._tell(
                    node,
                    lambda at_ms: node_events.JobReleased(
                        at_ms=at_ms, job_id=job_id, reason=reason
                    ),
                )
                self._allocate_soon()
            case _:
                self._work(job_id, command)

    def _work(self, job_id: JobId, command: Command) -> None:
        match command:
            case commands.InitialiseModel():
                self._later(EVALUATE_MS, lambda: self._set_first_model(job_id))
            case commands.PlanRound(request=request):
                self._later(PLAN_MS, lambda: self._set_plan(job_id, request))
            case commands.SetDeadline(round=round_, at_ms=at_ms):
                wait_ms = at_ms - self._agenda.now_ms
                self._later(wait_ms, lambda: self._deadline(job_id, round_))
            case commands.Aggregate():
                wait_ms = AGGREGATE_MS + self.model_ms + self._disk_ms(command)
                self._later(wait_ms, lambda: self._set_aggregate(job_id, command))
            case commands.EvaluateModel():
                answer = simulated_evaluation(command)
                self._later(EVALUATE_MS, lambda: self._take_answer(job_id, answer))
            case work_commands.WriteRecord(record=events.RoundRecorded() as record):
                self.rounds[job_id].append(record)
            case _:
                pass

    def _disk_ms(self, command: commands.Aggregate) -> int:
        if not self.disk_bytes_per_s:
            return 0
        size_bytes = self._sizes.model + sum(each.blob.size_bytes for each in command.updates)
        return -(-size_bytes * 1000 // self.disk_bytes_per_s)

    def _tell(self, node: NodeId, make: Callable[[Milliseconds], node_events.NodeEvent]) -> None:
        actor = self._nodes.get(node)
        if actor is not None and actor.is_connected:
            actor.deliver(make)

    def _assign(self, job_id: JobId, command: commands.AssignShard) -> None:
        work = command.assignment_at(self._agenda.now_ms)
        self._newest_leases[job_id, command.node] = work.lease.number
        self._tell(
            command.node, lambda at_ms: node_events.ShardAssigned(at_ms=at_ms, assignment=work)
        )

    def _set_first_model(self, job_id: JobId) -> None:
        first = Model(0, BlobRef(_digest(job_id), self._sizes.model_bytes))
        self.apply(
            job_id,
            events.ModelInitialised(
                at_ms=self._agenda.now_ms, model=first, partition_sizes=(Samples(1500),)
            ),
        )

    def _set_plan(self, job_id: JobId, request: PlanRequest) -> None:
        links = {node: actor.link for node, actor in self._nodes.items()}
        plan = self._measurements.plan_round_now(request, links)
        self.apply(job_id, events.RoundPlanned(at_ms=self._agenda.now_ms, plan=plan))

    def _deadline(self, job_id: JobId, number: int) -> None:
        self.apply(job_id, events.DeadlineReached(at_ms=self._agenda.now_ms, round=number))

    def _set_aggregate(self, job_id: JobId, command: commands.Aggregate) -> None:
        terms = [
            f"{update.slot} {update.weight} {update.blob.digest}" for update in command.updates
        ]
        digest = _digest(command.base.blob.digest, *terms)
        model = self._sizes.next_model(command.base, digest, down=command.down)
        draw = _digest(digest, "duplicates of the next round")
        self.apply(
            job_id,
            events.AggregateReady(
                at_ms=self._agenda.now_ms, round=command.round, model=model, draw=draw
            ),
        )

    def _take_answer(self, job_id: JobId, answer: Event) -> None:
        self.apply(job_id, msgspec.structs.replace(answer, at_ms=self._agenda.now_ms))

    # Allocation of nodes to jobs.

    def _job_of(self, node: NodeId) -> Job | None:
        return self.jobs[self._lent[node]] if node in self._lent else None

    def _silent(self, node: NodeActor, connection: int) -> None:
        if node.connection == connection and not node.is_connected:
            self._lose_node(node.node)

    def _silent_after_restart(self, node: NodeId) -> None:
        if node not in self._nodes or not self._nodes[node].is_connected:
            self._lose_node(node)

    def _lose_node(self, node: NodeId) -> None:
        self._nodes.pop(node, None)
        job_id = self._lent.pop(node, None)
        if job_id is not None:
            now_ms = self._agenda.now_ms
            self.apply(job_id, work_events.NodeLost(at_ms=now_ms, node=node, reason="silent"))
            self._allocate_soon()

    def _allocate_soon(self) -> None:
        if not self._is_allocating:
            self._is_allocating = True
            self._later(ALLOCATE_MS, self._allocate)

    def _allocate(self) -> None:
        self._is_allocating = False
        able = {job.spec.workload: _WORKLOAD_VERSION for job in self.jobs.values()}
        data_names = frozenset(job.spec.data.name for job in self.jobs.values())
        offers = [
            NodeOffer(
                node,
                self._lent.get(node),
                able,
                features=actor.device.features,
                data_names=data_names,
            )
            for node, actor in self._nodes.items()
            if actor.is_connected
        ]
        for move in plan_allocation([*map(self._demand, self._wanting())], offers):
            now_ms = self._agenda.now_ms
            if isinstance(move, Lend):
                self._lend(move)
            else:
                self.apply(
                    move.job_id,
                    work_events.NodeDraining(at_ms=now_ms, node=move.node, reason=move.reason),
                )

    def _lend(self, move: Lend) -> None:
        now_ms = self._agenda.now_ms
        if (before := self._lent.pop(move.node, None)) is not None:
            self.apply(
                before, work_events.NodeLost(at_ms=now_ms, node=move.node, reason=move.reason)
            )
        self._lent[move.node] = move.job_id
        self.apply(move.job_id, work_events.NodeJoined(at_ms=now_ms, node=move.node))

    def _wanting(self) -> list[Job]:
        idle = ENDED | {Phase.PAUSED, Phase.FINISHING}
        return [job for job in self.jobs.values() if job.phase not in idle]

    def _demand(self, job: Job) -> JobDemand:
        members = frozenset(
            node
            for node, member in job.members.items()
            if member.is_present and not member.is_leaving
        )
        return JobDemand(
            job_id=job.job_id,
            nodes_min=nodes_needed(job),
            workload=job.spec.workload,
            workload_version=_WORKLOAD_VERSION,
            members=members,
            nodes_max=job.spec.nodes.max,
            requirements=job.spec.nodes.requirements,
            data_name=job.spec.data.name,
            excluded={
                node: member.exclusion
                for node, member in job.members.items()
                if member.ban or (member.is_present and member.exclusion)
            },
        )

    def resumed_if_paused(self) -> None:
        """Play the user who resumes a job that paused itself."""
        for job_id, job in self.jobs.items():
            if job.phase is Phase.PAUSED:
                self.apply(job_id, work_events.JobResumed(at_ms=self._agenda.now_ms))


def _digest(*parts: str) -> Digest:
    return Digest(blake3("\n".join(parts).encode()).hexdigest())


def journal_digest(journal: list[Event]) -> Digest:
    """Names a journal by its bytes."""
    return Digest(blake3(b"\n".join(map(msgspec.json.encode, journal))).hexdigest())

"""Runs a world: the real cores of coordinator and nodes on virtual time, checked as they go."""

import random
from functools import partial

import msgspec

from coordinator.core import events
from coordinator.core.job import ENDED, Job, Phase
from gpu_node.core import events as node_events
from hypergpu.ids import Digest, JobId, NodeId
from hypergpu.units import Bytes, Milliseconds
from netsim.world.agenda import Agenda, Deed
from netsim.world.coordinator_actor import CoordinatorActor, journal_digest
from netsim.world.invariants import step_violations, violations
from netsim.world.node_actor import NodeActor
from netsim.world.worlds import World, random_link

_RESUME_EACH_MS = 60_000


class Outcome(msgspec.Struct, frozen=True):
    """What became of a world."""

    seed: int
    violations: tuple[str, ...]
    journals: dict[JobId, Digest]
    models: dict[JobId, Digest | None]
    rounds: int
    deeds: int
    virtual_ms: Milliseconds


class _BrokenError(Exception):
    """An invariant does not hold."""


class Simulation:
    """One world in motion."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._dice = random.Random(world.seed)
        self._agenda = Agenda()
        self._coordinator = CoordinatorActor(self._agenda, world.model_bytes, self._watch)
        self._nodes = [self._node(number) for number in range(world.nodes)]

    def run(self) -> Outcome:
        """Run to the end of every job, or until an invariant or the time limit breaks."""
        self._begin()
        broken: tuple[str, ...] = ()
        try:
            if not self._agenda.run(self._is_over, self._world.limit_ms):
                broken = (f"never finished: {self._where()}",)
        except (_BrokenError, AssertionError) as error:
            broken = (str(error),)
        jobs = self._coordinator.jobs
        return Outcome(
            seed=self._world.seed,
            violations=broken,
            journals={
                job_id: journal_digest(journal)
                for job_id, journal in self._coordinator.journals.items()
            },
            models={
                job_id: job.model.blob.digest if job.model else None for job_id, job in jobs.items()
            },
            rounds=sum(job.model.round for job in jobs.values() if job.model),
            deeds=self._agenda.done,
            virtual_ms=self._agenda.now_ms,
        )

    def _node(self, number: int) -> NodeActor:
        dice = random.Random(self._dice.getrandbits(64))
        node = NodeActor(
            NodeId(f"node-{number:04}"), self._agenda, self._coordinator, random_link(dice), dice
        )
        node.step_ms = dice.randint(*self._world.step_ms)
        node.update_bytes = Bytes(self._world.model_bytes // 4)
        node.worker_death = self._world.faults.worker_death
        return node

    def _begin(self) -> None:
        for number, spec in enumerate(self._world.jobs):
            created = events.JobCreated(
                at_ms=Milliseconds(0), job_id=JobId(f"job-{number}"), spec=spec
            )
            self._coordinator.created(created)
        for node in self._nodes:
            self._agenda.after(self._dice.randint(0, 500), node.start)
            self._plan_fault(self._world.faults.link_cut_ms, partial(self._cut, node))
            self._plan_fault(self._world.faults.node_crash_ms, partial(self._crash, node))
            self._plan_fault(self._world.faults.drain_ms, partial(self._drain, node))
        self._plan_fault(self._world.faults.coordinator_crash_ms, self._crash_coordinator)
        self._agenda.after(_RESUME_EACH_MS, self._resume)

    def _plan_fault(self, mean_ms: int, deed: Deed) -> None:
        """A Poisson process of faults that ends when the world says so."""
        if not mean_ms:
            return
        wait_ms = 1 + int(self._dice.expovariate(1 / mean_ms))

        def strike() -> None:
            deed()
            self._plan_fault(mean_ms, deed)

        if self._agenda.now_ms + wait_ms < self._world.faults_until_ms:
            self._agenda.after(wait_ms, strike)

    def _away_ms(self) -> int:
        return self._dice.randint(1, self._world.faults.away_ms)

    def _cut(self, node: NodeActor) -> None:
        node.is_reachable = False
        node.cut("the line went down")

        def heal() -> None:
            node.is_reachable = True

        self._agenda.after(self._away_ms(), heal)

    def _crash(self, node: NodeActor) -> None:
        if not node.is_alive:
            return
        node.crash()
        if node is not self._nodes[0] and self._dice.random() < self._world.faults.vanishing:
            return
        self._agenda.after(self._away_ms(), node.start)

    def _drain(self, node: NodeActor) -> None:
        """Ask a node to leave; its owner starts it again once it has."""
        node.happened(node_events.DrainRequested(at_ms=self._agenda.now_ms, reason="its owner"))
        limit_ms = node.session.drain_limit_ms + self._away_ms()
        self._agenda.after(limit_ms, lambda: None if node.is_alive else node.start())

    def _crash_coordinator(self) -> None:
        self._coordinator.crash(self._nodes, self._away_ms())

    def _resume(self) -> None:
        """Play the user: resume what paused itself."""
        if self._coordinator.is_up():
            self._coordinator.resumed_if_paused()
        self._agenda.after(_RESUME_EACH_MS, self._resume)

    def _watch(self, before: Job, after: Job) -> None:
        if not self._world.checks_each_event and before.model is after.model:
            return
        if broken := (*violations(after), *step_violations(before, after)):
            raise _BrokenError(f"{after.job_id} at {after.at_ms} ms: {'; '.join(broken)}")

    def _is_over(self) -> bool:
        return all(job.phase in ENDED for job in self._coordinator.jobs.values())

    def _where(self) -> str:
        places = [
            f"{job.job_id} is {job.phase.value} ({job.reason})"
            for job in self._coordinator.jobs.values()
            if job.phase is not Phase.FINISHED
        ]
        return ", ".join(places)

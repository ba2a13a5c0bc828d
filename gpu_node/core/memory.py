"""What a node remembers of its jobs: which end states it holds and what became of their updates.

Theory. Training round ``r`` from the end state of round ``b`` computes, with error feedback ``e``,

    sent(r) = C(e(b) + delta(r))        e(r) = e(b) + delta(r) - sent(r)

so what was sent must reach the model or come back: the residual to start from is ``e(b) + sent(b)``
when ``sent(b)`` was refused. That is decided when the job's next work arrives: an assignment names
the newest update that the coordinator accepted of this node, which was durable before it was named.
Two generations are kept, for a round that is assigned again starts from the end state before it,
never from its own.
"""

from typing import NamedTuple

import msgspec

from gpu_node.core.update import Update
from hypergpu.ids import JobId, Slot
from hypergpu.statements.assignment import Assignment, Lease, Task

JOBS_MAX = 8
"""End states are as large as models: a node that is told of no release must not fill its disk."""
ROUNDS_APART_MAX = 2
"""A residual older than this many rounds does more harm than good: training starts fresh."""


class Start(msgspec.Struct, frozen=True):
    """Where a training starts."""

    resume_from: int | None = None
    """Round of the end state; None: a fresh inner optimizer and an empty residual."""
    returns_update: bool = False
    """The update of that round was refused and goes back into the residual."""


FRESH = Start()


class EndState(msgspec.Struct, frozen=True, kw_only=True):
    """A training that finished: its end state and its update lie on disk."""

    lease: Lease
    slot: Slot
    task: Task
    start: Start
    update: Update
    is_accepted: bool = False
    """As far as the node has heard."""


class JobMemory(msgspec.Struct, frozen=True):
    """At most two end states of one lineage, the older first."""

    ends: tuple[EndState, ...] = ()


class Memory(msgspec.Struct, frozen=True):
    """Everything a node must not forget when it restarts. The job worked on last comes last."""

    jobs: dict[JobId, JobMemory] = {}

    def ends(self, job_id: JobId) -> tuple[EndState, ...]:
        """End states held for a job, the older first; empty for a job never seen."""
        job = self.jobs.get(job_id)
        return job.ends if job is not None else ()

    def with_ends(self, job_id: JobId, ends: tuple[EndState, ...]) -> "Memory":
        """The memory in which these are the job's end states."""
        others = {name: job for name, job in self.jobs.items() if name != job_id}
        return Memory({**others, job_id: JobMemory(ends)})

    def stale(self) -> frozenset[JobId]:
        """Jobs too many, longest not worked on first: their release never arrived."""
        return frozenset(tuple(self.jobs)[:-JOBS_MAX])


class Plan(NamedTuple):
    """How to go about an assignment."""

    memory: Memory
    """With what the assignment says about earlier updates, and without what it made void."""
    start: Start
    finished: EndState | None
    """This very work, done before: it is only to be sent."""


def plan_work(memory: Memory, assignment: Assignment) -> Plan:
    """Decide where an assignment's training starts, or that it is done already."""
    lease = assignment.lease
    ends = memory.ends(lease.job_id)
    earlier = _settled_end_states(
        tuple(end for end in ends if end.lease.round < lease.round), assignment
    )
    start = _start(earlier, lease.round)
    for end in ends:
        if end.lease.round == lease.round and _is_same_work(end, assignment, earlier, start):
            finished = msgspec.structs.replace(end, lease=lease)
            return Plan(memory.with_ends(lease.job_id, (*earlier, finished)), start, finished)
    return Plan(memory.with_ends(lease.job_id, earlier), start, None)


def _settled_end_states(
    earlier: tuple[EndState, ...], assignment: Assignment
) -> tuple[EndState, ...]:
    """The coordinator's word on the newest update is final, also against an earlier answer."""
    if not earlier:
        return earlier
    newest = earlier[-1]
    is_accepted = newest.update.digest == assignment.last_accepted
    return (*earlier[:-1], msgspec.structs.replace(newest, is_accepted=is_accepted))


def _start(earlier: tuple[EndState, ...], round_number: int) -> Start:
    if not earlier or round_number - earlier[-1].lease.round > ROUNDS_APART_MAX:
        return FRESH
    return Start(earlier[-1].lease.round, not earlier[-1].is_accepted)


def _is_same_work(
    end: EndState, assignment: Assignment, earlier: tuple[EndState, ...], start: Start
) -> bool:
    if end.slot != assignment.slot or end.task != assignment.task:
        return False
    # The fate of the update before may have been told differently since; then this one is void.
    return not earlier or end.start == start


def with_finished(memory: Memory, assignment: Assignment, start: Start, update: Update) -> Memory:
    """Remember a training that finished, and the one end state that a rollback of it needs."""
    job_id = assignment.lease.job_id
    end = EndState(
        lease=assignment.lease,
        slot=assignment.slot,
        task=assignment.task,
        start=start,
        update=update,
    )
    origin = tuple(held for held in memory.ends(job_id) if held.lease.round == start.resume_from)
    return memory.with_ends(job_id, (*origin, end))


def with_accepted(memory: Memory, lease: Lease) -> Memory:
    """Remember that the update under ``lease`` was accepted."""
    ends = tuple(
        msgspec.structs.replace(end, is_accepted=True) if end.lease == lease else end
        for end in memory.ends(lease.job_id)
    )
    return memory.with_ends(lease.job_id, ends)


def without_jobs(memory: Memory, job_ids: frozenset[JobId]) -> Memory:
    """Forget jobs."""
    return Memory({name: job for name, job in memory.jobs.items() if name not in job_ids})

"""The memory of a node: which end states it holds and which of their updates were accepted.

Theory. Training round ``r`` from the end state of round ``b`` computes, with error feedback ``e``,

    sent(r) = C(e(b) + delta(r))        e(r) = e(b) + delta(r) - sent(r)

so a sent update must reach the model or come back: the residual to start from is ``e(b) + sent(b)``
when ``sent(b)`` was rejected. That is decided when the job's next work arrives: an assignment names
the newest update that the coordinator accepted of this node, which was durable before it was named.
Two generations are kept, for a round that is assigned again starts from the end state before it,
never from its own.
"""

from typing import NamedTuple

import msgspec

from gpu_node.core.events import TrainedUpdate
from hypergpu.assignment import Assignment, Lease, Task
from hypergpu.ids import JobId, Slot

JOBS_MAX = 8
"""End states are as large as models: a node that misses releases must not fill its disk."""
ROUNDS_APART_MAX = 2
"""A residual older than this many rounds does more harm than good: training starts fresh."""


class TrainingStart(msgspec.Struct, frozen=True):
    """Where a training starts."""

    resume_from: int | None = None
    """Round of the end state; None: a fresh inner optimizer and an empty residual."""
    returns_update: bool = False
    """The update of that round was rejected and goes back into the residual."""


FRESH = TrainingStart()


class FinishedRound(msgspec.Struct, frozen=True, kw_only=True):
    """A training that finished: its end state and its update lie on disk."""

    lease: Lease
    slot: Slot
    task: Task
    start: TrainingStart
    update: TrainedUpdate
    is_accepted: bool = False
    """Whether the coordinator accepted the update, as far as the node knows."""


class Memory(msgspec.Struct, frozen=True):
    """Everything a node must not forget when it restarts.

    At most two rounds of each job, the older first. The job worked on last comes last.
    """

    jobs: dict[JobId, tuple[FinishedRound, ...]] = {}

    def rounds(self, job_id: JobId) -> tuple[FinishedRound, ...]:
        """Finished rounds of a job, the older first; none for a job never seen."""
        return self.jobs.get(job_id, ())

    def with_rounds(self, job_id: JobId, rounds: tuple[FinishedRound, ...]) -> "Memory":
        """The memory in which these are the job's finished rounds."""
        others = {name: job_memory for name, job_memory in self.jobs.items() if name != job_id}
        return Memory({**others, job_id: rounds})

    def stale(self) -> frozenset[JobId]:
        """Jobs too many, longest not worked on first: their release never arrived."""
        return frozenset(tuple(self.jobs)[:-JOBS_MAX])


class WorkPlan(NamedTuple):
    """How to do an assignment's work."""

    memory: Memory
    """Memory with the outcome that the assignment names, without rounds that it made void."""
    start: TrainingStart
    finished: FinishedRound | None
    """The same work, done before: only its update is to be sent."""


def plan_work(memory: Memory, assignment: Assignment) -> WorkPlan:
    """Decide where an assignment's training starts, or that it is done already."""
    lease = assignment.lease
    rounds = memory.rounds(lease.job_id)
    earlier = _with_outcome(
        tuple(each for each in rounds if each.lease.round < lease.round), assignment
    )
    start = _start(earlier, lease.round)
    for end in rounds:
        if end.lease.round == lease.round and _is_same_work(end, assignment, earlier, start):
            finished_round = msgspec.structs.replace(end, lease=lease)
            return WorkPlan(
                memory.with_rounds(lease.job_id, (*earlier, finished_round)), start, finished_round
            )
    return WorkPlan(memory.with_rounds(lease.job_id, earlier), start, None)


def _with_outcome(
    earlier: tuple[FinishedRound, ...], assignment: Assignment
) -> tuple[FinishedRound, ...]:
    """Set whether the newest update was accepted; the assignment outweighs an earlier answer."""
    if not earlier:
        return earlier
    newest = earlier[-1]
    is_accepted = newest.update.digest == assignment.last_accepted
    return (*earlier[:-1], msgspec.structs.replace(newest, is_accepted=is_accepted))


def _start(earlier: tuple[FinishedRound, ...], round_number: int) -> TrainingStart:
    if not earlier or round_number - earlier[-1].lease.round > ROUNDS_APART_MAX:
        return FRESH
    return TrainingStart(earlier[-1].lease.round, not earlier[-1].is_accepted)


def _is_same_work(
    end: FinishedRound,
    assignment: Assignment,
    earlier: tuple[FinishedRound, ...],
    start: TrainingStart,
) -> bool:
    if end.slot != assignment.slot or end.task != assignment.task:
        return False
    # The outcome of the update before may be another one by now; then this round is void.
    return not earlier or end.start == start


def with_finished(
    memory: Memory, assignment: Assignment, start: TrainingStart, update: TrainedUpdate
) -> Memory:
    """Remember a training that finished, and the one end state that a rollback of it needs."""
    job_id = assignment.lease.job_id
    end = FinishedRound(
        lease=assignment.lease,
        slot=assignment.slot,
        task=assignment.task,
        start=start,
        update=update,
    )
    origin = tuple(each for each in memory.rounds(job_id) if each.lease.round == start.resume_from)
    return memory.with_rounds(job_id, (*origin, end))


def with_accepted(memory: Memory, lease: Lease) -> Memory:
    """Remember that the update under ``lease`` was accepted."""
    rounds = tuple(
        msgspec.structs.replace(end, is_accepted=True) if end.lease == lease else end
        for end in memory.rounds(lease.job_id)
    )
    return memory.with_rounds(lease.job_id, rounds)


def without_jobs(memory: Memory, job_ids: frozenset[JobId]) -> Memory:
    """Forget jobs."""
    return Memory({name: job for name, job in memory.jobs.items() if name not in job_ids})

"""Shards that participants handed back. One that ran out of memory takes its own again, with less
in memory at once; a job in which everybody handed back pauses.
"""

from msgspec.structs import replace

from coordinator.core.persistent_map import replace_items
from coordinator.core.training.assignment import JobStep, assignment, replace_participants
from coordinator.core.training.available import available_nodes, left_out
from coordinator.core.training.job.events import MemoryFitted
from coordinator.core.training.job.state import Job, Phase
from coordinator.core.training.plan.memory_fit import fit_plan, tighter_fit
from coordinator.core.work.hand_back import hand_back_reasons
from coordinator.core.work.work_commands import WriteRecord
from hypergpu.ids import NodeId


def refit_work(job: Job, node: NodeId) -> JobStep:
    """Give an open participant its shard again under a fresh lease, or, where nothing would fit,
    no work in this job any more: then there are no commands, and the shard is still its own.

    Its limits stay those of its first try, so that it costs the round no more than a slow node.
    """
    round_ = job.open_round
    before = round_.participants[node]
    fit = tighter_fit(before.plan, round_.spec, can_checkpoint=job.can_checkpoint)
    members = replace_items(job.members, {node: replace(job.members[node], fit=fit)})
    if fit.shortage:
        return JobStep(replace(job, members=members))
    retry_reason = f"H={before.plan.inner_steps}, {before.plan.codec}, once more"
    plan = fit_plan(replace(before.plan, reason=retry_reason), fit, round_.spec)
    participant = replace(before, lease=job.next_lease, plan=plan)
    job = replace(
        job,
        round=replace_participants(round_, {node: participant}),
        members=members,
        next_lease=job.next_lease + 1,
    )
    record = MemoryFitted(
        at_ms=job.at_ms,
        node=node,
        round=round_.number,
        micro_batch=plan.micro_batch,
        checkpoints_activations=plan.checkpoints_activations,
        reason=plan.reason,
    )
    # Of a paused job a resume assigns it.
    again = (assignment(job, node),) if job.phase is Phase.TRAINING else ()
    return JobStep(job, (WriteRecord(record), *again))


def with_reason(job: Job, node: NodeId, reason: str) -> Job:
    """The job with a participant's reason for handing back."""
    round_ = job.open_round
    participant = replace(round_.participants[node], reason=reason)
    return replace(job, round=replace_participants(round_, {node: participant}))


def pause_stalled(job: Job) -> Job:
    """All available nodes gave their shards back: trying again at once would only repeat it. Where
    none of them may try again, whoever joins next gets a shard.
    """
    if not available_nodes(job):
        reason = f"waits for a node with more memory: {_reasons(job)}"
        return replace(job, reason=reason) if left_out(job) else job
    return replace(
        job,
        phase=Phase.PAUSED,
        resume_to=Phase.TRAINING,
        paused_at_ms=job.at_ms,
        reason=f"every participant handed its shard back: {_reasons(job)}",
    )


def _reasons(job: Job) -> str:
    return hand_back_reasons(job.round.participants.values() if job.round else ())

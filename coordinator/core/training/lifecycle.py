"""Opens rounds, closes them, weighs their updates, and ends jobs."""

from collections.abc import Mapping

from msgspec.structs import replace

from coordinator.core.training.assignment import (
    JobStep,
    assignment,
    cancellations,
    deadline,
    plan_request,
    replace_participants,
    round_base,
    without_participants,
)
from coordinator.core.training.available import (
    available_nodes,
    fit_of,
    left_out,
    nodes_needed,
)
from coordinator.core.training.deal import deal_shards
from coordinator.core.training.duplicate_shards import (
    drawn_duplicates,
    repeated_lease,
    with_common_work,
)
from coordinator.core.training.experts import with_experts
from coordinator.core.training.folding import aggregate
from coordinator.core.training.hand_back import pause_stalled
from coordinator.core.training.job.commands import (
    CancelShard,
    PlanRound,
)
from coordinator.core.training.job.state import Job, Participant, Phase, Round
from coordinator.core.training.long_leases import (
    folded_leases,
    is_base_free,
    lease_base,
    reserved_samples,
    void_all,
    with_earlier_duplicates,
    within_quota,
)
from coordinator.core.training.outrun import outrun_reason
from coordinator.core.training.plan.decision import NodePlan, PlanMemory, RoundPlan
from coordinator.core.training.plan.long_work import ROUNDS_MOST
from coordinator.core.training.plan.memory_fit import fit_plan
from coordinator.core.training.plan.prefetch import prefetch_limit
from coordinator.core.training.streams import return_samples
from coordinator.core.training.trust.duplicates import (
    slow_nodes,
)
from coordinator.core.training.waiting import (
    assigned_shards,
    members_on_trial,
    next_timer_ms,
    quorum,
    remaining_patience_ms,
    resting_members,
    standings_after,
)
from coordinator.core.work.funding import unfunded_left
from coordinator.core.work.leases import WorkState
from coordinator.core.work.members import available_count, release_all
from coordinator.core.work.work_events import JobPaused
from hypergpu.ids import NodeId
from hypergpu.jobfile.spec import SPARSE_CODECS, JobSpec
from hypergpu.units import Milliseconds, Samples, round_text, several


def open_round(job: Job) -> JobStep:
    """Open the next round, or have it planned, when enough nodes are there; else wait for them."""
    number = job.newest_model.round
    job = replace(job, spec=job.next_spec or job.spec, next_spec=None, round=None)
    present, needed_nodes = available_count(job), nodes_needed(job)
    if present < needed_nodes:
        reason = f"{present} of {needed_nodes} nodes are here"
        reason += f", {left_out_count} lack memory" if (left_out_count := left_out(job)) else ""
        return JobStep(replace(job, phase=Phase.WAITING, reason=reason))
    if job.lost_model:
        return JobStep(replace(job, phase=Phase.WAITING))
    if not available_nodes(job):
        reason = "every node that is here is at work under a lease over several rounds"
        return JobStep(replace(job, phase=Phase.WAITING, reason=reason))
    if job.spec.strategy == "aware":
        job = replace(job, phase=Phase.PLANNING, reason=f"{round_text(number)} is being planned")
        return JobStep(job, (PlanRound(plan_request(job)),))
    return _begin_round(job, _stated_plan(job))


def open_planned_round(job: Job, plan: RoundPlan) -> JobStep:
    """Open the round as planned, without the nodes that have gone since; if all have, plan again.

    A node that came since has no part in it, like any other that comes while a round is open.
    """
    available = available_nodes(job)
    nodes = {node: plan.nodes[node] for node in available if node in plan.nodes}
    plan = within_quota(job, replace(plan, nodes=nodes))
    nodes = plan.nodes
    is_staffed = any(part.rounds == 1 for part in nodes.values())
    if not is_staffed or available_count(job) < nodes_needed(job) or job.lost_model:
        return open_round(job)
    job = replace(job, plan_memory=plan.memory)
    return _begin_round(job, replace(plan, nodes=nodes))


def _begin_round(job: Job, plan: RoundPlan) -> JobStep:
    """Give every node of the plan its shard under a fresh lease, if the round is funded."""
    if why := _funding_gap(job, plan):
        return JobStep(replace(job, phase=Phase.WAITING, reason=why))
    total_samples = _total_samples(job, plan.round, len(plan.nodes))
    on_trial = members_on_trial(job, plan.nodes)
    job = with_experts(job, tuple(plan.nodes))
    duplicates = drawn_duplicates(job, plan)
    plan = with_common_work(job, plan, duplicates)
    own_shards = {node: part for node, part in plan.nodes.items() if node not in duplicates}
    deal = deal_shards(job, replace(plan, nodes=own_shards), total_samples)
    participants = {
        node: Participant(
            slot=job.members[node].slot,
            seed_slot=job.members[duplicates[node]].slot if node in duplicates else None,
            lease=lease,
            shard=deal.shards[duplicates.get(node, node)],
            plan=part,
            assigned_at_ms=job.at_ms,
            prefetched=deal.prefetched.get(node),
            work=_first_work(part, is_on_trial=node in on_trial),
            base=lease_base(job, part.rounds, total_samples) if part.rounds > 1 else None,
            repeats=repeated_lease(plan, duplicates, node),
            experts=job.members[node].experts,
        )
        for lease, (node, part) in enumerate(plan.nodes.items(), job.next_lease)
    }
    nodes_with_shard = tuple(participants)
    long = {node: each for node, each in participants.items() if each.base is not None}
    round_ = replace(
        _new_round(job, plan, participants, frozenset(on_trial), total_samples),
        duplicates={own: it for own, it in duplicates.items() if it not in long},
        dealt=len(deal.shards.keys() - long.keys()),
    )
    why = plan.reason or f"{len(round_.participants)} taking part"
    job = replace(
        job,
        phase=Phase.TRAINING,
        reason=f"{round_text(plan.round)}: {why}",
        round=round_,
        members=deal.members,
        streams=deal.streams,
        long_leases={**job.long_leases, **long},
        next_lease=job.next_lease + len(nodes_with_shard),
    )
    job = replace(job, round=replace(round_, timer_at_ms=next_timer_ms(job)))
    return JobStep(job, (*deadline(job), *(assignment(job, node) for node in nodes_with_shard)))


def _new_round(
    job: Job,
    plan: RoundPlan,
    given: Mapping[NodeId, Participant],
    on_trial: frozenset[NodeId],
    total_samples: Samples,
) -> Round:
    """The round as it opens; leases over several rounds are no part of it."""
    participants = {node: each for node, each in given.items() if each.base is None}
    trials = len(on_trial & participants.keys())
    resting_reasons = {**resting_members(job, plan.round), **plan.resting}
    return Round(
        number=plan.round,
        spec=job.spec,
        base_samples=job.tally.samples,
        total_samples=total_samples,
        opened_at_ms=job.at_ms,
        participants=participants,
        counts={
            WorkState.PENDING: len(participants) - trials,
            WorkState.ON_TRIAL: trials,
        },
        inner_steps=plan.memory.inner_steps,
        down=plan.down,
        is_sparse=plan.is_sparse,
        resting={node: why for node, why in resting_reasons.items() if node not in plan.nodes},
        deadline_at_ms=Milliseconds(job.at_ms + plan.deadline_ms if plan.deadline_ms else 0),
    )


def _first_work(part: NodePlan, *, is_on_trial: bool) -> WorkState:
    if part.rounds > 1:
        return WorkState.UNDER_WAY
    return WorkState.ON_TRIAL if is_on_trial else WorkState.PENDING


def _funding_gap(job: Job, plan: RoundPlan) -> str:
    """Why the job's funding does not cover the round; empty if it does."""
    batch, funding = job.spec.training.batch_size, job.funding
    samples = sum(part.inner_steps * part.batch(batch) for part in plan.nodes.values())
    done_samples = job.tally.samples + job.tally.samples_twice + reserved_samples(job)
    left_samples = unfunded_left(funding, samples, done_samples)
    if funding is None or left_samples is None:
        return ""
    why = funding.reason or f"raise pay.escrow: hypergpu job set {job.job_id} pay.escrow=AMOUNT"
    return f"{round_text(plan.round)} has {samples} samples, {left_samples} more are funded: {why}"


_TRIAL_PART = 4
"""A node on trial takes this part of the steps: it may be so many times slower and still be in
before the others, and its pace is known then.
"""


def _stated_plan(job: Job) -> RoundPlan:
    """The round as the job file has it, the same for every node but those that rest or are on
    trial, whatever was measured.
    """
    spec, number = job.spec, job.newest_model.round
    resting_reasons = resting_members(job, number)
    nodes = [node for node in available_nodes(job) if node not in resting_reasons]
    on_trial = members_on_trial(job, nodes)
    steps = spec.training.inner_steps
    full, trial = _stated_part(spec, steps), _stated_part(spec, max(1, steps // _TRIAL_PART))
    is_sparse = spec.codec.up in SPARSE_CODECS
    return RoundPlan(
        round=number,
        nodes={
            node: fit_plan(trial if node in on_trial else full, fit_of(job, node), spec)
            for node in nodes
        },
        resting=resting_reasons,
        deadline_ms=Milliseconds(spec.round.deadline_ms),
        down=spec.codec.down,
        is_sparse=is_sparse,
        memory=PlanMemory(steps, 0, is_sparse),
        reason="",
    )


def _stated_part(spec: JobSpec, steps: int) -> NodePlan:
    return NodePlan(
        inner_steps=steps,
        codec=spec.codec.up,
        reason=f"H={steps}, {spec.codec.up}",
        connections=spec.round.connections,
        prefetch_steps=prefetch_limit(spec, steps),
    )


def _total_samples(job: Job, number: int, participants: int) -> Samples:
    """Where schedules end: samples of the past, and of the rounds to come if all are like this."""
    training = job.spec.training
    if job.spec.strategy == "aware":
        return job.spec.stated_samples
    per_round = training.inner_steps * training.batch_size * participants
    return Samples(job.tally.samples + (training.rounds - number) * per_round)


def close_if_due(step: JobStep) -> JobStep:
    """Close the round if its rule says so; otherwise leave it open.

    It closes when no expected update is missing, or when its deadline has passed and a quorum is
    there. A round without a single update never closes. For nodes on trial it waits as long as the
    job has patience, once nobody else is awaited.
    """
    job, round_ = step.job, step.job.round
    if round_ is None or job.phase is not Phase.TRAINING or job.lost_model:
        return step
    received_count, pending_count, on_trial, handed_back = (
        round_.counts.get(work, 0) for work in _CLOSING
    )
    if not received_count and not (pending_count or on_trial) and handed_back:
        after = JobStep(pause_stalled(job))
    elif not received_count:
        after = _set_timer(job, next_timer_ms(job))
    elif not pending_count:
        after = _close_after_trials(job, round_)
    elif round_.is_overdue and received_count >= quorum(round_):
        quorum_text = f"{received_count} of {assigned_shards(round_)}, {quorum(round_)} needed"
        after = _close_round(job, round_, f"deadline passed with a quorum ({quorum_text})")
    elif received_count in (1, quorum(round_)) or round_.timer_at_ms <= job.at_ms:
        after = _set_timer(job, next_timer_ms(job))
    else:
        after = JobStep(job)
    return JobStep(after.job, (*step.commands, *after.commands))


def close_if_outrun(step: JobStep, node: NodeId) -> JobStep:
    """Close the round if it holds up a node whose update is in; see `outrun`."""
    why = outrun_reason(step.job, node)
    if not why:
        return step
    after = _close_round(step.job, step.job.open_round, why)
    return JobStep(after.job, (*step.commands, *after.commands))


_CLOSING = (WorkState.RECEIVED, WorkState.PENDING, WorkState.ON_TRIAL, WorkState.HANDED_BACK)
_PASSED_OVER = (WorkState.ON_TRIAL, WorkState.LATE)


def _close_after_trials(job: Job, round_: Round) -> JobStep:
    """Close the round in which nobody is awaited, unless there is patience for those on trial."""
    until_ms = round_.trial_until_ms or Milliseconds(job.at_ms + (job.patience_ms or 0))
    if round_.counts.get(WorkState.ON_TRIAL, 0) and until_ms > job.at_ms:
        job = replace(job, round=replace(round_, trial_until_ms=until_ms))
        return _set_timer(job, until_ms)
    received_count = round_.counts.get(WorkState.RECEIVED, 0)
    why = f"every expected update is there ({received_count} of {assigned_shards(round_)})"
    return _close_round(job, round_, why)


def _set_timer(job: Job, at_ms: Milliseconds) -> JobStep:
    """Let the round look again at that time; 0: not before something happens."""
    if job.open_round.timer_at_ms == at_ms:
        return JobStep(job)
    job = replace(job, round=replace(job.open_round, timer_at_ms=at_ms))
    return JobStep(job, deadline(job))


def end_job(job: Job, phase: Phase, reason: str, *, final_reason: str = "") -> JobStep:
    """Take all work back, let every node go, and move on to a last phase.

    Args:
        job: A job that has not ended.
        phase: The phase that it moves to.
        reason: What nodes are told.
        final_reason: The job's reason, where it is another.
    """
    cancels = cancellations(job.round, reason) if job.round is not None else ()
    job, void = void_all(job, reason)
    job, release_commands = release_all(job, reason)
    job = replace(job, phase=phase, resume_to=None, reason=final_reason or reason)
    return JobStep(job, (*cancels, *void, *release_commands))


def _close_round(job: Job, round_: Round, why: str) -> JobStep:
    """Let those go on whose updates are not in, or cut them and put their shards back, and
    aggregate the rest.
    """
    passed_over = sum(round_.counts.get(work, 0) for work in _PASSED_OVER)
    reason = f"{round_text(round_.number)} closed: {why}"
    reason += f"; {several(passed_over, 'node')} passed over" if passed_over else ""
    job = with_earlier_duplicates(job, round_)
    kept_participants = kept_leases(job)
    cut: dict[NodeId, Participant] = {
        node: replace(participant, work=_work_at_close(participant.work))
        for node, participant in round_.pending.items()
        if node not in kept_participants
    }
    streams = list(job.streams)
    open_shards = [
        participant.shard
        for node, participant in cut.items()
        if participant.repeats is None
        and not round_.is_covered(node)
        and round_.duplicates.get(node) not in cut
    ]
    for shard in (*open_shards, *round_.orphans):
        return_samples(streams, shard.partition, shard.ranges)
    slow, quorum_count = slow_nodes(round_, job.at_ms), quorum(round_)
    closed_round = replace(round_, orphans=(), slow=slow, updates_needed=quorum_count)
    closed_round = without_participants(closed_round, kept_participants.keys())
    closed_round = replace_participants(closed_round, cut)
    folded_participants = folded_leases(job, round_)
    lapsed_nodes = {
        node for node, each in folded_participants.items() if each.work is WorkState.CUT
    }
    for node in lapsed_nodes:
        return_samples(
            streams,
            folded_participants[node].shard.partition,
            folded_participants[node].shard.ranges,
        )
    closed_round = replace_participants(closed_round, folded_participants)
    job = replace(
        job,
        phase=Phase.AGGREGATING,
        reason=reason,
        round=closed_round,
        members=standings_after(job),
        patience_ms=remaining_patience_ms(job),
        streams=tuple(streams),
        long_leases={n: each for n, each in job.long_leases.items() if n not in folded_participants}
        | kept_participants,
    )
    cancels = (
        *(each for each in cancellations(round_, reason) if each.node not in kept_participants),
        *(_lapse(node, folded_participants[node]) for node in lapsed_nodes),
    )
    return JobStep(job, (*cancels, aggregate(job, closed_round, job.newest_model)))


def kept_leases(job: Job) -> dict[NodeId, Participant]:
    """Participants of the open round whose updates are not in as it closes, and whose leases go on
    over further rounds: of a planned job all but pairs, whose updates are compared.
    """
    round_ = job.open_round
    if round_.spec.strategy != "aware" or not is_base_free(job):
        return {}
    base = replace(round_base(job), last_round=round_.number + ROUNDS_MOST - 1)
    return {
        node: replace(participant, work=WorkState.UNDER_WAY, base=base)
        for node, participant in round_.pending.items()
        if round_.partner(node) is None and participant.repeats is None
    }


def _lapse(node: NodeId, participant: Participant) -> CancelShard:
    """The end of a lease over several rounds whose update did not come."""
    if participant.base is None:
        raise AssertionError("a lease that lapses lasted several rounds")
    first, last = participant.base.round, participant.base.last_round
    reason = f"its lease of {several(last - first + 1, 'round')} is over"
    return CancelShard(node, first, participant.lease, reason)


def _work_at_close(work: WorkState) -> WorkState:
    return WorkState.PASSED_OVER if work in _PASSED_OVER else WorkState.CUT


def pause_job(job: Job, event: JobPaused) -> JobStep:
    """Take pending work back; keep everything that was accepted."""
    is_training = job.phase is Phase.TRAINING
    cancels = cancellations(job.open_round, "the job was paused") if is_training else ()
    job, void = void_all(job, "the job was paused")
    job = replace(
        job,
        phase=Phase.PAUSED,
        resume_to=job.phase,
        paused_at_ms=job.at_ms,
        reason=event.reason or "paused by its user",
    )
    return JobStep(job, (*cancels, *void))

"""The machine: one served model, advanced one event at a time. Pure, as every core is.

As many nodes as asked for hold the model, each under a lease without an end. A replica whose node
leaves, or gives it back, goes to another node. Calls are no part of the machine: the shell routes
them (`routing`), and none outlives the process. Counts of their tokens are (`counting`): a model
that is stopped ends once its nodes have signed the last ones.
"""

from collections.abc import Callable, Mapping

from msgspec.structs import replace

from coordinator.core.serving import events
from coordinator.core.serving.counting import (
    close_counts,
    count_rejection,
    end_settlement,
    signature_rejection,
    take_count,
    take_signature,
)
from coordinator.core.serving.honesty import (
    check_rejection,
    leave_undecided,
    take_check,
    undecided_rejection,
)
from coordinator.core.serving.leasing import (
    ServeStep,
    cancel,
    end_job,
    lease_replicas,
    void_leases,
    with_serve_member,
    without_lease,
)
from coordinator.core.serving.ring_placing import (
    leave_unplaced,
    place_ring,
    placement_rejection,
    unplaced_rejection,
)
from coordinator.core.serving.ring_rounds import stored_round_rejection, take_stored_round
from coordinator.core.serving.stage_honesty import (
    contradiction_rejection,
    stage_check_rejection,
    take_contradiction,
    take_stage_check,
)
from coordinator.core.serving.standby import (
    move_rejection,
    move_stage,
    place_standby,
    standby_rejection,
)
from coordinator.core.serving.state import ServeJob, ServeMember, ServePhase
from coordinator.core.work import work_events
from coordinator.core.work.funding import Funding
from coordinator.core.work.leases import WorkState, lease_rejection
from coordinator.core.work.members import (
    membership_rejection,
    next_slot,
    present_again,
    release_if_leaving,
    with_leaving,
    with_member,
    without_presence,
)
from hypergpu.serving.tuned_model import ModelVersion

_LIVE = frozenset({ServePhase.SERVING, ServePhase.PAUSED})
_SERVING = frozenset({ServePhase.SERVING})
_SETTLING = frozenset({ServePhase.SETTLING})
_COUNTING = _LIVE | _SETTLING
_ANY = frozenset(ServePhase)
_FAILURES_MOST = 3
"""Times in a row that a node may give its replica back."""
_REFUSALS_KEPT = 16
_REASON_LENGTH_MOST = 300
LEGAL: Mapping[type, frozenset[ServePhase]] = {
    events.ServeCreated: frozenset(),
    events.ReplicaHandedBack: _SERVING,
    events.VersionPublished: _LIVE,
    events.ModelUnloaded: _SERVING,
    events.ModelWanted: _SERVING,
    events.RingPlaced: _SERVING,
    events.RingUnplaced: _SERVING,
    events.StandbyPlaced: _SERVING,
    events.StageMoved: _SERVING,
    events.RingRoundStored: _LIVE,
    events.WindowCounted: _COUNTING,
    events.WindowSigned: _COUNTING,
    events.WindowAccepted: _ANY,
    events.WindowRefused: _ANY,
    events.AnswerChecked: _COUNTING,
    events.CheckUndecided: _COUNTING,
    events.AnswerDoubted: _ANY,
    events.StageChecked: _LIVE,
    events.StagesContradicted: _SERVING,
    events.CountsClosed: _SETTLING,
    events.SettlementDue: _SETTLING,
    work_events.NodeJoined: _LIVE,
    work_events.NodeLost: _LIVE,
    work_events.NodeDraining: _LIVE,
    work_events.NodePaused: _LIVE,
    work_events.NodeReadmitted: _LIVE,
    work_events.JobPaused: _SERVING,
    work_events.JobResumed: frozenset({ServePhase.PAUSED}),
    work_events.JobStopped: _LIVE,
    work_events.FundingChanged: _LIVE,
    work_events.CoordinatorChanged: _COUNTING,
    work_events.JobEnded: _ANY,
}


def rejection(job: ServeJob, event: events.ServeEvent) -> str:
    """Why the job does not accept the event now; empty when it does."""
    if job.phase not in LEGAL[type(event)]:
        return f"{job.job_id} is {job.phase.value} and has no place for {type(event).__name__}"
    if isinstance(event, work_events.MembershipEvent):
        return membership_rejection(job, event)
    reject = _REJECTIONS.get(type(event))
    return reject(job, event) if reject else ""


def _hand_back_rejection(job: ServeJob, event: events.ReplicaHandedBack) -> str:
    replica = job.leases.get(event.node)
    if replica is None:
        return f"{event.node} has no replica of {job.job_id}"
    return lease_rejection(replica, event.lease)


def _version_rejection(job: ServeJob, event: events.VersionPublished) -> str:
    job_tuning = job.tuning
    if job_tuning is None or not job_tuning.follows:
        return f"{job.job_id} follows no training"
    if event.rounds <= job_tuning.version.round:
        return f"{job.job_id} has the model of round {job_tuning.version.round} already"
    return ""


def _unload_rejection(job: ServeJob, _: events.ModelUnloaded) -> str:
    return f"{job.job_id} is unloaded already" if job.is_unloaded else ""


def _load_rejection(job: ServeJob, _: events.ModelWanted) -> str:
    return "" if job.is_unloaded else f"{job.job_id} is not unloaded"


_REJECTIONS: Mapping[type, Callable[..., str]] = {
    events.ReplicaHandedBack: _hand_back_rejection,
    events.VersionPublished: _version_rejection,
    events.ModelUnloaded: _unload_rejection,
    events.ModelWanted: _load_rejection,
    events.RingPlaced: placement_rejection,
    events.RingUnplaced: unplaced_rejection,
    events.StandbyPlaced: standby_rejection,
    events.StageMoved: move_rejection,
    events.RingRoundStored: stored_round_rejection,
    events.WindowCounted: count_rejection,
    events.WindowSigned: signature_rejection,
    events.AnswerChecked: check_rejection,
    events.CheckUndecided: undecided_rejection,
    events.StageChecked: stage_check_rejection,
    events.StagesContradicted: contradiction_rejection,
}


def transition(job: ServeJob | None, event: events.ServeEvent) -> ServeStep:
    """Advance the job by one event."""
    if job is None:
        if not isinstance(event, events.ServeCreated):
            raise ValueError(f"a journal begins with ServeCreated, not {type(event).__name__}")
        return ServeStep(_new_job(event))
    if rejection(job, event):
        return ServeStep(job)
    now = replace(job, at_ms=max(job.at_ms, event.at_ms))
    advance = _STEPS.get(type(event))
    return advance(now, event) if advance else ServeStep(now)


def _new_job(event: events.ServeCreated) -> ServeJob:
    return ServeJob(
        job_id=event.job_id,
        owner=event.owner,
        reason="waits for nodes",
        at_ms=event.at_ms,
        request=event.request,
        terms=event.terms,
        funding=event.funding,
        files=event.files,
        tuning=event.tuning,
    )


def _take_version(job: ServeJob, event: events.VersionPublished) -> ServeStep:
    """Give nodes this version from now on; those that hold another are offered it by the shell."""
    if job.tuning is None:
        return ServeStep(job)
    version = ModelVersion(event.rounds, event.blob)
    return ServeStep(replace(job, tuning=replace(job.tuning, version=version)))


def _unload(job: ServeJob, event: events.ModelUnloaded) -> ServeStep:
    step = void_leases(job, event.reason)
    return ServeStep(replace(step.job, is_unloaded=True, reason=event.reason), step.commands)


def _load(job: ServeJob, _: events.ModelWanted) -> ServeStep:
    return lease_replicas(replace(job, is_unloaded=False))


def _add_node(job: ServeJob, event: work_events.NodeJoined) -> ServeStep:
    member = job.members.get(event.node) or ServeMember(slot=next_slot(job))
    member = replace(present_again(member, event), refusal="", failures_in_a_row=0)
    return lease_replicas(with_member(job, event.node, member))


def _lose_node(job: ServeJob, event: work_events.NodeLost | work_events.NodePaused) -> ServeStep:
    cancels = (cancel(job, event.node, event.reason),) if event.node in job.leases else ()
    job = without_presence(without_lease(job, event.node), event.node)
    return ServeStep(job, cancels).then(lease_replicas(job))


def _drain_node(job: ServeJob, event: work_events.NodeDraining) -> ServeStep:
    """Take the replica at once: another one goes on with what it was answering."""
    cancels = (cancel(job, event.node, event.reason),) if event.node in job.leases else ()
    job = with_leaving(without_lease(job, event.node), event.node)
    job, releases = release_if_leaving(job, event.node)
    return ServeStep(job, (*cancels, *releases)).then(lease_replicas(job))


def _readmit_node(job: ServeJob, event: work_events.NodeReadmitted) -> ServeStep:
    return lease_replicas(with_serve_member(job, event.node, ban=""))


def _take_back(job: ServeJob, event: events.ReplicaHandedBack) -> ServeStep:
    replica, member = job.leases[event.node], job.members[event.node]
    reason = event.reason[:_REASON_LENGTH_MOST] or "no reason was given"
    failures = member.failures_in_a_row + 1
    job = with_serve_member(without_lease(job, event.node), event.node, failures_in_a_row=failures)
    if event.is_lasting or failures >= _FAILURES_MOST:
        replica = replace(replica, work=WorkState.HANDED_BACK, reason=reason)
        job = with_serve_member(job, event.node, refusal=reason)
        job = replace(job, refusals=(*job.refusals, replica)[-_REFUSALS_KEPT:])
    job, releases = release_if_leaving(job, event.node)
    return ServeStep(job, releases).then(lease_replicas(job))


def _pause_job(job: ServeJob, event: work_events.JobPaused) -> ServeStep:
    step = void_leases(job, "the job was paused")
    reason = event.reason or "paused by its user"
    return ServeStep(replace(step.job, phase=ServePhase.PAUSED, reason=reason), step.commands)


def _resume_job(job: ServeJob, _: work_events.JobResumed) -> ServeStep:
    for node, member in job.members.items():
        if member.refusal or member.failures_in_a_row:
            job = with_serve_member(job, node, refusal="", failures_in_a_row=0)
    job = replace(job, phase=ServePhase.SERVING, refusals=(), is_unloaded=False)
    return lease_replicas(job)


def _stop_job(job: ServeJob, _: work_events.JobStopped) -> ServeStep:
    return end_job(job, "stopped by its user")


def _fund_job(job: ServeJob, event: work_events.FundingChanged) -> ServeStep:
    return lease_replicas(replace(job, funding=Funding(event.funded_units, event.reason)))


_STEPS: Mapping[type, Callable[..., ServeStep]] = {
    events.VersionPublished: _take_version,
    events.ModelUnloaded: _unload,
    events.ModelWanted: _load,
    work_events.NodeJoined: _add_node,
    work_events.NodeLost: _lose_node,
    work_events.NodePaused: _lose_node,
    work_events.NodeDraining: _drain_node,
    work_events.NodeReadmitted: _readmit_node,
    work_events.FundingChanged: _fund_job,
    events.ReplicaHandedBack: _take_back,
    events.RingPlaced: place_ring,
    events.RingUnplaced: leave_unplaced,
    events.StandbyPlaced: place_standby,
    events.StageMoved: move_stage,
    events.RingRoundStored: take_stored_round,
    events.WindowCounted: take_count,
    events.WindowSigned: take_signature,
    events.AnswerChecked: take_check,
    events.CheckUndecided: leave_undecided,
    events.StageChecked: take_stage_check,
    events.StagesContradicted: take_contradiction,
    events.CountsClosed: close_counts,
    events.SettlementDue: end_settlement,
    work_events.JobPaused: _pause_job,
    work_events.JobResumed: _resume_job,
    work_events.JobStopped: _stop_job,
}

"""Whether a stage of a ring computes its layers: a pure rule over checks and contradictions.

A conversation of a stage is drawn in secret once it is over. A node that does not hold the stage
computes again what the stage was given, and tells how far from that lies what it gave. Honest nodes
differ by rounding alone, up to `DISTANCE_MOST`; the last stage, which gives tokens, is judged as
whole replicas are (`honesty`).

Nobody's word counts for more than another's. A check that finds a stage wrong, a stage that blames
the one before, and neighbours whose digests differ are all *contradictions* between two nodes. Who
is contradicted by two owners, by nodes that nobody else contradicts, is at fault: one liar among
others ends there. Between two alone nobody decides: neither is at fault, and what it was about is
not paid.

Limit and share are measured: `benchmarks/stages.py`, part ``liars``.
"""

from collections.abc import Mapping
from typing import NamedTuple

from msgspec.structs import replace

from coordinator.core.serving.commands import RefuseStage
from coordinator.core.serving.events import AnswerDoubted, StageChecked, StagesContradicted
from coordinator.core.serving.honesty import CheckShare, after_check, fault_reason, may_check
from coordinator.core.serving.leasing import (
    ServeStep,
    cancel,
    lease_replicas,
    with_serve_member,
    without_lease,
)
from coordinator.core.serving.standby import give_layers
from coordinator.core.serving.state import ServeJob, StageRecord
from coordinator.core.work.members import free_nodes
from coordinator.core.work.work_commands import WriteRecord
from hypergpu.ids import NodeId
from hypergpu.rings.stage_work import ModelCut
from hypergpu.serving.check_messages import StageFigures

DISTANCE_MOST = 50_000
"""Distance of nine in ten rows, in millionths, that honest nodes stay below."""
TRIAL_SESSIONS = 20
"""Conversations that are to be checked before a node is checked rarely."""
TRIAL_PERMILLE, USUAL_PERMILLE, ALL_PERMILLE = 500, 20, 1_000
"""Shares of a stage's conversations that are checked, in thousandths."""
OWNERS_LEAST = 2
"""Owners whose nodes contradict one that is at fault."""
CLEARING_SESSIONS = 20
"""Right checks in a row, by a node that does not contradict it, after which a node's contradictions
are forgotten.
"""
_PPM = 1_000_000


class Contradiction(NamedTuple):
    """What follows where two nodes contradict each other."""

    job: ServeJob
    """With the contradiction noted."""
    at_fault: NodeId | None
    """The node that is at fault; None: nobody can decide."""
    reason: str


def stage_check_share(record: StageRecord) -> CheckShare:
    """The share of a stage's conversations that are checked in secret."""
    if record.contradictions:
        return CheckShare(ALL_PERMILLE, "another node contradicts it")
    if record.checked < TRIAL_SESSIONS:
        return CheckShare(TRIAL_PERMILLE, f"{record.checked} conversations of it were checked")
    return CheckShare(USUAL_PERMILLE, "what it gave was right so far")


def nodes_of_ring(job: ServeJob, cut: ModelCut) -> int:
    """Nodes that rings of a model use at most: one more where two that hold something contradict
    each other, as a third one is to decide.
    """
    records = (job.members[node].stage_record for node in job.stages)
    is_in_doubt = cut.has_standby and any(record.contradictions for record in records)
    return cut.nodes_most + (job.rings - 1) * cut.stages + is_in_doubt


def distance_reason(figures: StageFigures) -> str:
    """Why a stage that gives hidden states is doubted; empty: it is not."""
    if figures.distance_ppm <= DISTANCE_MOST:
        return ""
    return (
        f"its hidden states are {figures.distance_ppm / _PPM:.1%} from those of its layers, where"
        f" honest ones stay below {DISTANCE_MOST / _PPM:.0%}"
    )


def may_check_stage(job: ServeJob, node: NodeId, checker: NodeId) -> bool:
    """Whether a node may compute a stage of another one again."""
    return may_check(job, node, checker) and checker not in job.stages


def stage_check_rejection(job: ServeJob, event: StageChecked) -> str:
    """Why a check changes nothing; empty: it does."""
    replica = job.stages.get(event.node)
    if replica is None or replica.lease != event.lease:
        return f"{event.node} does not hold a stage under lease {event.lease}"
    if event.checker not in job.members or event.checker == event.node:
        return f"{event.checker} cannot check {event.node}"
    figures = event.figures
    if figures.rows <= 0 or figures.distance_ppm < 0:
        return f"{figures.rows} rows have no distance of {figures.distance_ppm}"
    return ""


def contradiction_rejection(job: ServeJob, event: StagesContradicted) -> str:
    """Why a contradiction changes nothing; empty: it does."""
    for node, lease in ((event.node, event.lease), (event.other, event.other_lease)):
        if node not in job.leases or job.leases[node].lease != lease:
            return f"{node} has no lease {lease} of {job.job_id} any more"
    return "" if event.node != event.other else f"{event.node} contradicts itself"


def take_stage_check(job: ServeJob, event: StageChecked) -> ServeStep:
    """Judge a stage by a check."""
    member = job.members[event.node]
    if event.figures.scored is None:
        reason = distance_reason(event.figures)
    else:
        honesty = after_check(member.honesty, event.figures.scored)
        reason = fault_reason(honesty, event.figures.scored)
        kept_honesty = member.honesty if reason else honesty
        job = with_serve_member(job, event.node, honesty=kept_honesty)
    if not reason:
        return ServeStep(_with_right_check(job, event))
    contradiction = _contradiction(job, event.node, event.checker, reason)
    step = _refuse(contradiction.job, event.check, event.node, contradiction.reason)
    if contradiction.at_fault is not None:
        return step.then(_convict(step.job, contradiction.at_fault, contradiction.reason))
    return step.then(_with_other_checker(step.job, event.checker))


def _with_right_check(job: ServeJob, event: StageChecked) -> ServeJob:
    record = job.members[event.node].stage_record
    is_independent = event.checker not in record.contradictions
    right_count = record.right_checks + is_independent
    record = replace(record, checked=record.checked + 1, right_checks=right_count)
    job = with_serve_member(job, event.node, stage_record=record)
    if not record.contradictions or right_count < CLEARING_SESSIONS:
        return job
    return _without_contradictions(job, event.node)


def _without_contradictions(job: ServeJob, node: NodeId) -> ServeJob:
    """Forget what a node and others said of each other."""
    for other in job.members[node].stage_record.contradictions:
        record = job.members[other].stage_record
        rest = {each: count for each, count in record.contradictions.items() if each != node}
        job = with_serve_member(job, other, stage_record=replace(record, contradictions=rest))
    record = replace(job.members[node].stage_record, contradictions={})
    return with_serve_member(job, node, stage_record=record)


def take_contradiction(job: ServeJob, event: StagesContradicted) -> ServeStep:
    """Judge two nodes that contradict each other; where a pass cannot go on, one of both goes.

    The first time that is the one that is blamed, the next time the one that blames, and so on: a
    node that blames falsely costs another one its layers once, and itself the next time.
    """
    contradiction = _contradiction(job, event.node, event.other, event.reason)
    job = contradiction.job
    step = ServeStep(job)
    for node in (event.node, event.other):
        step = step.then(_refuse(step.job, event.check, node, contradiction.reason))
    if contradiction.at_fault is not None:
        return step.then(_convict(step.job, contradiction.at_fault, contradiction.reason))
    if not event.is_stuck:
        return step
    times = job.members[event.node].stage_record.contradictions[event.other]
    leaving_node = event.node if times % 2 else event.other
    return step.then(_take_layers(step.job, leaving_node, contradiction.reason))


def _contradiction(job: ServeJob, node: NodeId, other: NodeId, reason: str) -> Contradiction:
    """Note that two nodes contradict each other, and decide whether one is at fault."""
    for one, its_other in ((node, other), (other, node)):
        record = job.members[one].stage_record
        times = record.contradictions.get(its_other, 0) + 1
        contradictions = {**record.contradictions, its_other: times}
        record = replace(record, contradictions=contradictions, right_checks=0)
        job = with_serve_member(job, one, stage_record=record)
    text = f"{node} and {other} contradict each other: {reason}"
    for one, its_other in ((node, other), (other, node)):
        if _owners_against(job, one) >= OWNERS_LEAST and _owners_against(job, its_other) == 1:
            count = len(job.members[one].stage_record.contradictions)
            text = f"{count} nodes contradict it, which nobody else contradicts: {reason}"
            return Contradiction(job, one, text)
    return Contradiction(job, None, text)


def _owners_against(job: ServeJob, node: NodeId) -> int:
    """Owners whose nodes contradict a node; one whose token is not known has one node."""
    contradictions: Mapping[NodeId, int] = job.members[node].stage_record.contradictions
    return len({job.members[other].token or other for other in contradictions})


def _refuse(job: ServeJob, check: int, node: NodeId, reason: str) -> ServeStep:
    """Pay what a check was about to nobody."""
    record = AnswerDoubted(at_ms=job.at_ms, node=node, reason=reason)
    return ServeStep(job, (RefuseStage(check, node, reason), WriteRecord(record)))


def _convict(job: ServeJob, node: NodeId, reason: str) -> ServeStep:
    """Give a node no work of this job any more; others are no longer doubted for its sake."""
    faults = job.members[node].honesty.faults + 1
    honesty = replace(job.members[node].honesty, faults=faults, excess=0)
    job = _without_contradictions(with_serve_member(job, node, honesty=honesty, ban=reason), node)
    return _take_layers(job, node, reason)


def _take_layers(job: ServeJob, node: NodeId, reason: str) -> ServeStep:
    """Take what a node holds; the one that stands by has it next, unless that is in doubt."""
    if node not in job.leases:
        return ServeStep(job)
    standby, able_nodes = job.standby, free_nodes(job, job.stages)
    if node in job.stages and standby is not None and standby in able_nodes:
        is_doubted = bool(job.members[standby].stage_record.contradictions)
        if not is_doubted:
            return give_layers(job, node, standby, reason)
    step = ServeStep(without_lease(job, node), (cancel(job, node, reason),))
    return step.then(lease_replicas(step.job))


def _with_other_checker(job: ServeJob, checker: NodeId) -> ServeStep:
    """Have a third node stand by, and so check, where one is free."""
    if job.standby != checker or not free_nodes(job, job.leases):
        return ServeStep(job)
    return _take_layers(job, checker, "a third node is to compute the same stage again")

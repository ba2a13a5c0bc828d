"""Whether a replica gives what the model that it was given says: a pure rule over secret checks.

A check reads a prompt with the tokens of its answer once, on another node, and tells how far each
token is from the one that the call's seed and the token's position give there (its *margin*, 0 for
the same token). Honest nodes differ by rounding, so that single margins say little. They are summed
less an allowance, never below zero (Page's test): an honest node stays near zero for ever, and
whoever answers by other weights or other sampling climbs with each token. Where the sum passes its
limit a third node scores the answer that took it there; only where that comes to the same, the node
is at fault. Where nobody can decide, the answer is not paid and nobody is at fault.

The allowance and the limit are measured: `benchmarks/serve.py`, part ``honesty``.
"""

import msgspec
from msgspec.structs import replace

from coordinator.core.serving.commands import CheckAgain, RefuseAnswer
from coordinator.core.serving.events import AnswerChecked, AnswerDoubted, CheckUndecided
from coordinator.core.serving.leasing import (
    ServeStep,
    cancel,
    lease_replicas,
    with_serve_member,
    without_lease,
)
from coordinator.core.serving.state import AnswerDispute, NodeHonesty, ServeJob
from coordinator.core.work.work_commands import WriteRecord
from hypergpu.ids import NodeId
from hypergpu.serving.calls import MARGIN_MOST, CheckFigures

ALLOWANCE = 15_000
"""Margin of a token that honest nodes may have on average, in the unit of `MARGIN_MOST`."""
EXCESS_MOST = 1_500_000
"""Sum of what is above the allowance at which a node is doubted."""
TRIAL_TOKENS = 2_000
"""Tokens that are to be checked before a node is checked rarely."""
TRIAL_PERMILLE, USUAL_PERMILLE, ALL_PERMILLE = 500, 50, 1_000
"""Shares of a node's answers that are checked, in thousandths."""
FAULTS_MOST = 2
"""Faults for which a node is banned; one that was not checked enough gets no second try."""
MISJUDGEMENTS_MOST = 2
"""Checks of a node that a third one contradicted, after which it checks nothing more."""
_UNIT = 1_000_000


class CheckShare(msgspec.Struct, frozen=True):
    """How many of a node's answers are checked."""

    permille: int
    reason: str


def check_share(honesty: NodeHonesty) -> CheckShare:
    """The share of a node's answers that are checked in secret."""
    if honesty.faults:
        return CheckShare(ALL_PERMILLE, "an answer of it was at fault")
    if honesty.excess > EXCESS_MOST // 3:
        return CheckShare(ALL_PERMILLE, "its newest answers differ more than rounding does")
    if honesty.checked_tokens < TRIAL_TOKENS:
        return CheckShare(TRIAL_PERMILLE, f"{honesty.checked_tokens} tokens of it were checked")
    return CheckShare(USUAL_PERMILLE, "its answers were right so far")


def after_check(honesty: NodeHonesty, figures: CheckFigures) -> NodeHonesty:
    """A node's record after one more check."""
    excess = honesty.excess + figures.margin - ALLOWANCE * figures.tokens
    checked_tokens = honesty.checked_tokens + figures.tokens
    return replace(honesty, excess=max(0, excess), checked_tokens=checked_tokens)


def fault_reason(honesty: NodeHonesty, figures: CheckFigures) -> str:
    """Why a node is doubted after a check; empty: it is not.

    Args:
        honesty: Its record, with the check.
        figures: Of the check.
    """
    if figures.claimed_prompt_tokens > figures.prompt_tokens > 0:
        claim, right = figures.claimed_prompt_tokens, figures.prompt_tokens
        return f"it counted {claim} tokens of a prompt that has {right}"
    if honesty.excess <= EXCESS_MOST:
        return ""
    mean = figures.margin / max(1, figures.tokens) / _UNIT
    return (
        f"its tokens are {mean:.3f} deviations from those of the model on average, where honest"
        f" ones stay below {ALLOWANCE / _UNIT:g}"
    )


def may_check(job: ServeJob, node: NodeId, checker: NodeId) -> bool:
    """Whether a member may score answers of another: not those of its own twin."""
    one, other = job.members.get(node), job.members.get(checker)
    if one is None or other is None or node == checker:
        return False
    is_other_owner = bool(other.token) and other.token != one.token
    is_other_line = not other.address or other.address != one.address
    is_good = other.misjudgements < MISJUDGEMENTS_MOST and not other.honesty.faults
    return other.can_work and is_other_owner and is_other_line and is_good


def check_rejection(job: ServeJob, event: AnswerChecked) -> str:
    """Why a check changes nothing; empty: it does."""
    if event.node not in job.members or event.checker not in job.members:
        return f"{event.node} or {event.checker} was never in {job.job_id}"
    figures = event.figures
    if not 0 <= figures.margin <= figures.tokens * MARGIN_MOST or figures.tokens <= 0:
        return f"{figures.tokens} tokens have no margin of {figures.margin}"
    dispute = job.disputes.get(event.answer)
    if dispute is not None and event.checker in {dispute.node, dispute.checker}:
        return f"{event.checker} has scored answer {event.answer} already"
    return ""


def take_check(job: ServeJob, event: AnswerChecked) -> ServeStep:
    """Judge a node by a check, or have a third node decide."""
    if (dispute := job.disputes.get(event.answer)) is not None:
        return _decide(_without_dispute(job, event.answer), dispute, event)
    before = job.members[event.node].honesty
    honesty = after_check(before, event.figures)
    reason = fault_reason(honesty, event.figures)
    if not reason:
        return ServeStep(with_serve_member(job, event.node, honesty=honesty))
    dispute = AnswerDispute(node=event.node, checker=event.checker, before=before, reason=reason)
    disputes = {**job.disputes, event.answer: dispute}
    return ServeStep(replace(job, disputes=disputes), (CheckAgain(event.answer),))


def _without_dispute(job: ServeJob, answer: int) -> ServeJob:
    disputes = {number: each for number, each in job.disputes.items() if number != answer}
    return replace(job, disputes=disputes)


def _decide(job: ServeJob, dispute: AnswerDispute, event: AnswerChecked) -> ServeStep:
    """A third node's figures take the place of the first one's."""
    honesty = after_check(dispute.before, event.figures)
    reason = fault_reason(honesty, event.figures)
    if reason:
        return _convict(job, event, reason)
    job = with_serve_member(job, event.node, honesty=honesty)
    misjudgements = job.members[dispute.checker].misjudgements + 1
    return ServeStep(with_serve_member(job, dispute.checker, misjudgements=misjudgements))


def _convict(job: ServeJob, event: AnswerChecked, reason: str) -> ServeStep:
    """Pay an answer to nobody, and ban its node where it is not the first time."""
    member = job.members[event.node]
    faults = member.honesty.faults + 1
    is_banned = faults >= FAULTS_MOST or member.honesty.checked_tokens < TRIAL_TOKENS
    job = with_serve_member(
        job,
        event.node,
        honesty=replace(member.honesty, faults=faults, excess=0),
        ban=f"two nodes agree: {reason}" if is_banned else member.ban,
    )
    step = ServeStep(job, (RefuseAnswer(event.answer, reason), _doubt_record(job, event, reason)))
    if not is_banned or event.node not in job.leases:
        return step
    cancels = (cancel(job, event.node, reason),)
    step = ServeStep(without_lease(job, event.node), (*step.commands, *cancels))
    return step.then(lease_replicas(step.job))


def _doubt_record(job: ServeJob, event: AnswerChecked | CheckUndecided, reason: str) -> WriteRecord:
    return WriteRecord(AnswerDoubted(at_ms=job.at_ms, node=event.node, reason=reason))


def leave_undecided(job: ServeJob, event: CheckUndecided) -> ServeStep:
    """Nobody can decide about an answer: it is not paid, and all further ones are checked."""
    dispute = job.disputes[event.answer]
    reason = f"{dispute.reason}, as {dispute.checker} says; no third node is there to decide"
    honesty = replace(dispute.before, excess=max(dispute.before.excess, EXCESS_MOST // 2))
    job = with_serve_member(_without_dispute(job, event.answer), event.node, honesty=honesty)
    return ServeStep(job, (RefuseAnswer(event.answer, reason), _doubt_record(job, event, reason)))


def undecided_rejection(job: ServeJob, event: CheckUndecided) -> str:
    """Why there is nothing to leave undecided; empty: there is."""
    dispute = job.disputes.get(event.answer)
    if dispute is None or dispute.node != event.node:
        return f"answer {event.answer} is not in doubt"
    return ""

"""The weighing of a round whose updates were held against samples of their own shards.

Pay and fold are two numbers. Pay is honesty times the work that an update shows; the fold is that
times its use for held-out data. So a node of rare data is paid in full while it counts less. Who is
left out moves no median by which the others are clipped, weighed and judged.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence

from msgspec.structs import replace

from coordinator.core.training.job.trust_memory import TrustMemory, Weighing
from coordinator.core.training.trust.honesty import (
    OUT_BELOW,
    Judgement,
    belief,
    judge_honesty,
    ramp,
    rounds_of_look,
    weighted_median,
)
from coordinator.core.training.trust.noise import judge_noise
from coordinator.core.training.trust.pay_share import pay_shares
from coordinator.core.training.trust.weights import (
    NODES_LEAST,
    WHOLE,
    UpdateEvidence,
    clip_factors,
    unusable,
    usual_lengths,
    weigh_updates,
)
from hypergpu.ids import NodeId

HOPELESS = WHOLE // 10
"""An update that is left out counts towards a ban where its node's honesty is lower than that."""
HONEST_FROM, HONEST_FULL = 0.2, 0.5
"""Honesty by earlier rounds that earns nothing, and everything, where updates are tried."""
USE_LEAST = WHOLE // 5
"""Part of a vote that honest updates of new jobs keep, however little use held-out samples see in
them: these are few, and late in a job their gradient is noise.
"""
VOTES_LEAST = 0.25
"""Part of all votes below which a step is the shorter the fewer there are."""
LENGTH_MOST = 2.0
"""An update may be so many times as long as the longest usual one of any round before."""
WORK_FULL = 0.25
"""An update of this part of the usual length for its steps shows full work: lengths differ much
with unequal data.
"""


def weigh_by_own_samples(
    memory: TrustMemory, round_: Sequence[UpdateEvidence], error: float
) -> Weighing:
    """Weigh the updates of a closed round.

    Args:
        memory: What earlier rounds taught.
        round_: Evidence of each update, in slot order.
        error: Standard error of a cosine between two sketches.
    """
    judgement = judge_honesty(memory, round_)
    honest = [each for each in round_ if judgement.honesty[each.node] >= OUT_BELOW]
    work = _work(honest if len(honest) >= NODES_LEAST else round_)
    inside = [each for each in honest if work.get(each.node, 1.0) >= OUT_BELOW]
    if len(inside) < NODES_LEAST:
        inside = list(round_)
    weighing = judge_noise(
        _with_pay(weigh_updates(judgement.memory, inside), inside), inside, error
    )
    paid_weighing = _with_work(_with_honesty(weighing, judgement, inside), work)
    paid_weighing = _with_pay_shares(memory, paid_weighing, judgement, round_)
    told_weighing = _with_use_told(paid_weighing, weighing)
    if not memory.use_least:
        return told_weighing
    return _with_known_lengths(_with_short_step(told_weighing, round_), round_)


def _work(round_: Sequence[UpdateEvidence]) -> dict[NodeId, float]:
    """How much of the usual work each update shows, in [0, 1], by its length. Who can be held
    against no length is not there.
    """
    usual = usual_lengths(round_)
    return {
        each.node: min(1.0, each.norm / (WORK_FULL * usual[each.node]))
        for each in round_
        if usual.get(each.node, 0.0) > 0
    }


def _with_pay(weighing: Weighing, inside: Sequence[UpdateEvidence]) -> Weighing:
    """The weighing with full pay for all but copies, and updates that no work makes."""
    unusable_updates = dict(unusable(inside, clip_factors(inside)))
    counts = Counter(each.group for each in inside if each.group)
    copies = {each.node: counts[each.group] for each in inside if counts[each.group] > 1}
    pay = {node: WHOLE // count**2 for node, count in copies.items()}
    pay |= dict.fromkeys(unusable_updates, 0)
    return replace(
        weighing,
        pay=pay,
        pay_reasons={node: weighing.reasons[node] for node in pay},
        useless=tuple(sorted(unusable_updates)),
    )


def _with_honesty(
    weighing: Weighing, judgement: Judgement, inside: Sequence[UpdateEvidence]
) -> Weighing:
    """The weighing times honesty; updates that are not inside count nothing."""
    present = {each.node for each in inside}
    honesty = judgement.honesty
    uses = _uses(weighing, present, honesty)
    votes = {node: int(each * uses[node]) for node, each in honesty.items()}
    memory = weighing.memory
    paid_parts = honesty
    if memory.pay is not None:
        # Doubts of this round's cosines alone take no pay, unless they leave the update out.
        paid_parts = {
            node: ramp(belief(memory, node), HONEST_FROM, HONEST_FULL) for node in honesty
        }
    pay = {
        node: int(each * (weighing.pay or {}).get(node, WHOLE)) for node, each in paid_parts.items()
    }
    out = {node for node, each in honesty.items() if each < OUT_BELOW and node not in present}
    pay |= dict.fromkeys(out, 0)
    if not any(votes.values()):
        votes = pay
    # One look bans nobody: rounds that the memory alone decides count for nothing.
    out &= judgement.looked_at
    hopeless = [node for node in out if memory.honesty.get(node, WHOLE) < HOPELESS]
    return replace(
        weighing,
        votes={node: vote for node, vote in votes.items() if vote < WHOLE},
        pay={node: part for node, part in pay.items() if part < WHOLE},
        reasons=_join_reasons(judgement.reasons, weighing.reasons),
        pay_reasons=_join_reasons(
            {
                node: why
                for node, why in judgement.reasons.items()
                if paid_parts[node] < 1 or node in out
            },
            weighing.pay_reasons,
        ),
        useless=tuple(sorted({*weighing.useless, *hopeless})),
    )


def _uses(
    weighing: Weighing, present: Collection[NodeId], nodes: Iterable[NodeId]
) -> dict[NodeId, int]:
    """How much each update counts by its use, in 1/65,536: nothing of those that are not inside.
    Copies, noise and updates that no work makes keep what is left of them, others a least part.
    """
    least = dict.fromkeys((*weighing.useless, *(weighing.pay or {})), 0)
    return {
        node: max(least.get(node, weighing.memory.use_least), weighing.votes.get(node, WHOLE))
        if node in present
        else 0
        for node in nodes
    }


def _with_work(weighing: Weighing, work: Mapping[NodeId, float]) -> Weighing:
    """The weighing with less pay for updates that show less than the usual work."""
    short = {node: part for node, part in work.items() if part < 1}
    pay = weighing.pay or {}
    why = {
        node: f"its update has {WORK_FULL * part:.2f} of the usual length for its steps"
        for node, part in short.items()
    }
    less_pay = {node: int(part * pay.get(node, WHOLE)) for node, part in short.items()}
    return replace(
        weighing,
        pay={**pay, **less_pay},
        reasons=_join_reasons(weighing.reasons, why),
        pay_reasons=_join_reasons(weighing.pay_reasons, why),
    )


def _with_pay_shares(
    memory: TrustMemory, weighing: Weighing, judgement: Judgement, round_: Sequence[UpdateEvidence]
) -> Weighing:
    """The weighing with pay for no more than the update earns by its own samples."""
    before = weighing.memory.pay
    if before is None:
        return weighing
    own = {each.node: each.own for each in round_ if each.own is not None and each.norm > 0}
    looks = {node: rounds_of_look(memory, node) for node in own}
    judgement_of_pay = pay_shares(before, own, judgement.honesty, judgement.memory.steepest, looks)
    pay, shares = weighing.pay or {}, judgement_of_pay.shares
    less_pay = {node: int(WHOLE * each) for node, each in shares.items() if each < 1}
    return replace(
        weighing,
        pay={**pay, **{node: min(it, pay.get(node, WHOLE)) for node, it in less_pay.items()}},
        pay_reasons=_join_reasons(weighing.pay_reasons, judgement_of_pay.reasons),
        memory=replace(weighing.memory, pay=judgement_of_pay.memory),
    )


def _with_use_told(weighing: Weighing, use: Weighing) -> Weighing:
    """The weighing whose nodes are told, too, why they count less in the fold than they are paid.

    Args:
        weighing: Complete.
        use: By the use of the updates alone.
    """
    pay, notes = weighing.pay_shares, {}
    for node, vote in weighing.votes.items():
        share = pay.get(node, WHOLE)
        if vote < share and node in use.reasons:
            prefix = "paid in full, but " if share == WHOLE else ""
            notes[node] = f"{prefix}it counts {vote / WHOLE:.2f} in the fold: {use.reasons[node]}"
    return replace(weighing, pay_reasons=_join_reasons(weighing.pay_reasons, notes))


def _with_short_step(weighing: Weighing, round_: Sequence[UpdateEvidence]) -> Weighing:
    """The weighing whose fold is shorter where next to nobody has a vote: a mean of updates that
    hardly count would be as long as any other.
    """
    votes = {each.node: weighing.votes.get(each.node, WHOLE) for each in round_}
    total, wanted_total = sum(votes.values()), VOTES_LEAST * WHOLE * len(round_)
    if not 0 < total < wanted_total:
        return weighing
    part = total / wanted_total
    voters = [node for node, vote in votes.items() if vote]
    why = f"so few updates have a vote that the step is {part:.2f} of a usual one"
    return replace(
        weighing,
        clips={
            **weighing.clips,
            **{node: int(part * weighing.clips.get(node, WHOLE)) for node in voters},
        },
        reasons=_join_reasons(weighing.reasons, dict.fromkeys(voters, why)),
    )


def _with_known_lengths(weighing: Weighing, round_: Sequence[UpdateEvidence]) -> Weighing:
    """The weighing whose updates are no longer than earlier rounds' by far: where liars have all
    the votes of a round, its own usual length is theirs.
    """
    longest, clips, reasons = weighing.memory.step_length_most, dict(weighing.clips), {}
    for each in round_:
        limit = LENGTH_MOST * longest * each.inner_steps
        part = clips.get(each.node, WHOLE) / WHOLE
        if longest and each.norm * part > limit:
            clips[each.node] = int(WHOLE * limit / each.norm)
            reasons[each.node] = f"it is cut to {LENGTH_MOST:g} times the longest usual update yet"
    lengths = [
        (
            each.norm * clips.get(each.node, WHOLE) / WHOLE / max(1, each.inner_steps),
            weighing.votes.get(each.node, WHOLE),
        )
        for each in round_
        if weighing.votes.get(each.node, WHOLE)
    ]
    if lengths:
        longest = max(longest, weighted_median(lengths))
    return replace(
        weighing,
        clips=clips,
        reasons=_join_reasons(weighing.reasons, reasons),
        memory=replace(weighing.memory, step_length_most=longest),
    )


def _join_reasons(*kinds: Mapping[NodeId, str]) -> dict[NodeId, str]:
    nodes = dict.fromkeys(node for kind in kinds for node in kind)
    return {node: "; ".join(kind[node] for kind in kinds if node in kind) for node in nodes}

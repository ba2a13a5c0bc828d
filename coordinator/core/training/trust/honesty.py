"""How far a node does the work that it was given, by samples that it was given.

Theory of operation. The coordinator knows which samples it assigned. The evaluator differentiates
the loss of a few secret ones of each shard at the model that the shard's update starts from. An
honest update goes down that slope, whatever its node's data are; so the cosine with the gradient of
its *own* samples tells honest nodes of rare data from liars, which one gradient of all classes does
not: a node that holds two classes may have any cosine with that.

- A *ratio* holds the cosine against the round's usual one, which those make who are trusted: 1 is
  usual. Where the usual cosine is small it is mostly noise, and the ratio is nearer to 1.
- The least ratio of a group of layers counts half: a lie in one layer is in no cosine of all.
- *Honesty* is a memory that ratios move. A step is as large as the gradient is long against the
  longest of late, and as the usual cosine stands out of the spread: a node whose samples are
  learnt, and a round in which nothing is gained any more, tell little.
- This round's ratio counts at once where it is clear, whatever the memory.
- An *average* of plain ratios over rounds tells who always does half of what others do: a node that
  trains one sample in place of all, or works against its samples now and then.

A node whose samples were not drawn in a round is judged by its memory, and so are all where fewer
than three were measured. Who was never looked at is a newcomer, and a look stands for the rounds
since the last, up to `LOOK_MOST`: of 200 nodes each is seen every tenth round.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from msgspec.structs import replace

from coordinator.core.training.job.trust_memory import TrustMemory
from coordinator.core.training.trust.own_evidence import OwnEvidence
from coordinator.core.training.trust.weights import (
    FADE,
    FIRST_ROUNDS,
    FIRST_TIMES,
    FULL_FROM,
    NEWCOMER,
    NODES_LEAST,
    RETURN,
    STEP,
    WHOLE,
    UpdateEvidence,
)
from hypergpu.ids import NodeId

OUT_BELOW = 0.3
"""Who is less honest is left out, and out of every median."""
HONESTY_MOST = 1.5
RATIO_MOST = 2.0
BAR = 0.4
"""A ratio below it lowers honesty."""
CLEAR_SPREADS = 2.5
"""Ratios tell all they can where the usual cosine is so many standard deviations of them; less
where it is nearer to 0: then an honest one may well be negative.
"""
FEW = 4
"""A spread of so many cosines is doubled: few of them may be near each other by chance."""
_MAD = 1.48
"""The median distance to the median, times this, is the standard deviation of a normal spread."""
COSINE_CLEAR = 0.25
"""Ratios to a smaller usual cosine tell less, too: all of it may be noise, as on even data once
little is gained any more.
"""
COSINE_LEAST = 1e-3
TRUST_LEAST = 0.05
"""What the least honest node counts in medians, so that there is one."""
AVERAGE_RATE = 0.12
"""Part by which a round moves a node's average."""
AVERAGE_CLEAR = 0.15
"""Rounds whose usual cosine is smaller move averages less. How it stands out of the spread is not
asked here: liars who turn round together make the spread, and an average bears noise.
"""
AVERAGE_FROM, AVERAGE_FULL = 0.35, 0.55
"""Averages that leave nothing, and everything."""
LOOK_MOST = 4
"""Rounds before its own that a look stands for at most."""
NOW_POWER = 0.3
"""A gradient of this part of the longest of late already speaks for the round in full."""
NOW_FROM, NOW_FULL = 0.1, 0.3
"""Ratios of a round that take everything, and nothing, whatever the memory."""
LAYER_FROM, LAYER_FULL = -0.2, 0.1
"""The same for the least ratio of a group of layers."""


class Judgement(NamedTuple):
    """How honest each node's update of a round is."""

    honesty: dict[NodeId, float]
    """In [0, 1]; below `OUT_BELOW` it is left out."""
    reasons: dict[NodeId, str]
    """Why it is not 1."""
    memory: TrustMemory
    """After the round."""
    looked_at: frozenset[NodeId] = frozenset()
    """Nodes whose samples were differentiated."""


class _Ratios(NamedTuple):
    """One update's cosines as parts of the round's usual ones."""

    whole: float
    least: float
    """The least ratio of its groups of layers."""

    @property
    def joint(self) -> float:
        return min(self.whole, (self.whole + self.least) / 2)


def belief(memory: TrustMemory, node: NodeId) -> float:
    """How honest a node is by earlier rounds, in [0, 1]."""
    return min(1.0, _before(memory, node) / FULL_FROM)


def _before(memory: TrustMemory, node: NodeId) -> float:
    first = WHOLE if memory.rounds < FIRST_ROUNDS else NEWCOMER
    return memory.honesty.get(node, first) / WHOLE


def judge_honesty(memory: TrustMemory, round_: Sequence[UpdateEvidence]) -> Judgement:
    """Judge the updates of a closed round by samples of their own shards.

    Args:
        memory: What earlier rounds taught.
        round_: Evidence of each update; those without own evidence are judged by the memory.
    """
    before = {each.node: _before(memory, each.node) for each in round_}
    own = {each.node: each.own for each in round_ if each.own is not None and each.norm > 0}
    if len(own) < NODES_LEAST:
        return _by_memory(memory, before)
    trust = {node: max(before[node], TRUST_LEAST) for node in own}
    usual = usual_cosine({node: each.cosine for node, each in own.items()}, trust)
    ratios, averages = _ratios(own, trust, usual), _averages(memory, own, usual)
    steepest = _longest(memory, own, trust)
    looks = {node: rounds_of_look(memory, node) for node in own}
    # Who was not looked at stays new, and so is looked at first.
    after = {} if memory.unseen is not None else dict(before)
    honesty, reasons = {}, {}
    for node, each in own.items():
        power = min(1.0, each.steepness / steepest) if steepest > 0 else 0.0
        after[node] = _honesty_after(
            memory.rounds, before[node], ratios[node].joint, power * usual.clearness, looks[node]
        )
        now = _of_round(ratios[node], min(1.0, power / NOW_POWER))
        average_part = ramp(averages[node], AVERAGE_FROM, AVERAGE_FULL)
        honesty[node] = min(1.0, after[node] / FULL_FROM, now, average_part)
        if honesty[node] < 1:
            reasons[node] = _reason(each, ratios[node], after[node], averages[node])
    others = _by_memory(memory, {node: it for node, it in before.items() if node not in own})
    honesty_after = {node: round(WHOLE * each) for node, each in after.items()}
    memory = replace(
        memory,
        honesty={**memory.honesty, **honesty_after},
        steepest=steepest,
        averages={**memory.averages, **averages},
        unseen=_unseen_after(memory, round_, own),
    )
    return Judgement(
        {**honesty, **others.honesty}, {**reasons, **others.reasons}, memory, frozenset(own)
    )


def rounds_of_look(memory: TrustMemory, node: NodeId) -> int:
    """How many rounds a look at a node's update stands for: this one, and those since the last."""
    return 1 + min(LOOK_MOST, (memory.unseen or {}).get(node, 0))


def _unseen_after(
    memory: TrustMemory, round_: Sequence[UpdateEvidence], own: Mapping[NodeId, OwnEvidence]
) -> dict[NodeId, int] | None:
    if memory.unseen is None:
        return None
    counts = dict(memory.unseen)
    for each in round_:
        if each.node in own:
            counts.pop(each.node, None)
        elif each.norm > 0:
            counts[each.node] = counts.get(each.node, 0) + 1
    return counts


def _by_memory(memory: TrustMemory, before: Mapping[NodeId, float]) -> Judgement:
    honesty = {node: min(1.0, each / FULL_FROM) for node, each in before.items()}
    reasons = {
        node: f"by earlier rounds alone its honesty is {before[node]:.2f}"
        for node, each in honesty.items()
        if each < 1
    }
    return Judgement(honesty, reasons, memory)


def _ratios(
    own: Mapping[NodeId, OwnEvidence], trust: Mapping[NodeId, float], usual: "UsualCosine"
) -> dict[NodeId, _Ratios]:
    whole = _ratios_of({node: each.cosine for node, each in own.items()}, usual)
    groups = range(min(len(each.layers) for each in own.values()))
    layers = [
        _ratios_of(cosines, usual_cosine(cosines, trust))
        for group in groups
        for cosines in [{node: each.layers[group] for node, each in own.items()}]
    ]
    return {
        node: _Ratios(whole[node], min((each[node] for each in layers), default=1.0))
        for node in own
    }


class UsualCosine(NamedTuple):
    """The usual cosine of a round."""

    cosine: float
    clearness: float
    """In [0, 1]: how far it stands out of the spread."""


def usual_cosine(cosines: Mapping[NodeId, float], trust: Mapping[NodeId, float]) -> UsualCosine:
    """The median of a round's cosines, and how clear it is.

    Args:
        cosines: Of at least one node.
        trust: How far each node is believed: its weight in the median.
    """
    usual = weighted_median([(each, trust[node]) for node, each in cosines.items()])
    # Only cosines above the usual one make the spread: lies are below it.
    spread = _MAD * weighted_median(
        [(each - usual, trust[node]) for node, each in cosines.items() if each >= usual]
    )
    spread *= 1 + FEW / len(cosines)
    clearness = min(1.0, max(0.0, usual) / max(CLEAR_SPREADS * spread, COSINE_LEAST))
    return UsualCosine(usual, clearness * min(1.0, max(0.0, usual) / COSINE_CLEAR))


def _ratios_of(cosines: Mapping[NodeId, float], usual: UsualCosine) -> dict[NodeId, float]:
    """Cosines as parts of the usual one, nearer to 1 the less that one stands out."""
    return {
        node: 1 + usual.clearness * (_part(each, usual.cosine) - 1)
        for node, each in cosines.items()
    }


def _part(cosine: float, usual: float) -> float:
    return min(RATIO_MOST, max(-RATIO_MOST, cosine / max(usual, COSINE_LEAST)))


def _averages(
    memory: TrustMemory, own: Mapping[NodeId, OwnEvidence], usual: "UsualCosine"
) -> dict[NodeId, float]:
    """Each node's average of its cosines as parts of the usual ones."""
    rate = AVERAGE_RATE * min(1.0, max(0.0, usual.cosine) / AVERAGE_CLEAR)
    averages = {}
    for node, each in own.items():
        before = memory.averages.get(node, 1.0)
        part = _part(each.cosine, usual.cosine)
        averages[node] = before + rate * (part - before)
    return averages


def _longest(
    memory: TrustMemory, own: Mapping[NodeId, OwnEvidence], trust: Mapping[NodeId, float]
) -> float:
    """The longest usual gradient of late."""
    steep = weighted_median([(each.steepness, trust[node]) for node, each in own.items()])
    return max(steep, memory.steepest * FADE)


def _honesty_after(rounds: int, before: float, ratio: float, power: float, look: int) -> float:
    """Honesty after a round, whose look stands for so many."""
    step = look * STEP * power * (FIRST_TIMES if rounds < FIRST_ROUNDS else 1.0)
    after = before + step * (ratio - BAR) + RETURN * power * (1 - before)
    return min(HONESTY_MOST, max(0.0, after))


def _of_round(ratios: _Ratios, clearness: float) -> float:
    """The most that this round's ratios leave."""
    whole = ramp(ratios.joint, NOW_FROM, NOW_FULL)
    layer = ramp(ratios.least, LAYER_FROM, LAYER_FULL)
    return 1 - clearness * (1 - min(whole, layer))


def ramp(value: float, low: float, high: float) -> float:
    """0 up to ``low``, 1 from ``high`` on, and linear between."""
    return min(1.0, max(0.0, (value - low) / (high - low)))


def _reason(own: OwnEvidence, ratios: _Ratios, honesty: float, average: float) -> str:
    layer_text = ""
    if own.layers and ratios.least < ratios.whole:
        layer_text = f" and {ratios.least:.2f} of it in its worst layers"
    return (
        f"on samples of its own shard its update does {ratios.whole:.2f} of the usual{layer_text}"
        f", {average:.2f} over rounds: honesty {honesty:.2f}"
    )


def weighted_median(values: Sequence[tuple[float, float]]) -> float:
    """The value, of ``(value, weight)``, below and above which lies half of the weight."""
    ordered_values = sorted(values)
    half = sum(weight for _, weight in ordered_values) / 2
    for value, weight in ordered_values:
        half -= weight
        if half <= 0:
            return value
    return ordered_values[-1][0]

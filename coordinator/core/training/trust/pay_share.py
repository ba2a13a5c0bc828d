"""What share of full pay an update earns by secret samples of its own shard.

Theory of operation. The fold needs many updates and forgives: an update that does no harm may
count. Pay is judged more strictly, by what no honest work lacks.

- A *trial* compares the loss of the samples at the base with their loss at the base less the
  update. A node that trains one sample in place of all makes the others worse, and so does one
  that works against its samples; the cosine with the mean of their gradients hides the first.
- The *worst group of layers* counts, and not their mean: noise in one layer is no work.
- *Averages* over rounds of the gain, of the cosine and of each group's cosine, all as parts of the
  usual ones. The least decides.
- *Debts*: an update that makes its own samples clearly worse takes the pay of later rounds, too, so
  that nobody lives on the good rounds between two lies. Rounds without a fault pay a debt off.

What is usual is a median over nodes, each as far as it is believed. Evidence counts the less the
less the usual stands out and the less there is left to gain: late in a job trials and cosines are
noise. Averages and debts then stay as they were.
"""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from msgspec.structs import replace

from coordinator.core.training.job.trust_memory import PayMemory, TrustMemory
from coordinator.core.training.trust.honesty import (
    COSINE_LEAST,
    TRUST_LEAST,
    ramp,
    usual_cosine,
    weighted_median,
)
from coordinator.core.training.trust.own_evidence import OwnEvidence
from coordinator.core.training.trust.weights import NODES_LEAST, WHOLE, known_votes
from hypergpu.ids import NodeId

THOUSAND = 1_000
"""Averages and debts are kept in thousandths."""
PART_MOST = 1.5
GAIN_CLEAR = 0.25
"""Gains tell all they can where the usual one is so large."""
GAIN_LEAST = 1e-3
"""Usual gains are held to be no smaller."""
FALL_CLEAR = 0.4
"""There is all left to gain where the usual update takes off so large a part of the most that one
took off in any round.
"""
LOSS_FLOOR, FALL_FLOOR = 0.1, 0.03
"""Parts of the round's usual loss, and of the largest fall, below which losses tell little."""
GAIN_FROM, GAIN_FULL = 0.3, 0.55
"""Parts of the usual gain that earn nothing in a round, and everything."""
LAYER_FROM, LAYER_FULL = 0.05, 0.25
"""The same of the worst group's cosine."""
AVERAGE_RATE = 0.3
"""The part by which a round that tells all it can moves an average."""
LOOK_OF_AVERAGES_MOST = 3
"""Rounds that a look stands for in averages at most: 25 samples are noise enough."""
AVERAGE_FROM, AVERAGE_FULL = 0.3, 0.6
"""Least averages that earn nothing, and everything."""
POWER_FULL = 0.3
"""A gradient of this part of the longest of late already speaks in full."""
WORSE_FROM, WORSE_FULL = 0.1, 0.3
"""Losses in place of a gain that are no fault, and a whole one."""
HARM_FROM, HARM_FULL = 1.0, 2.0
"""The same of a rise of the loss, as a part of the most that an update took off in any round: it
tells also where nothing is left to gain.
"""
AGAINST_FROM, AGAINST_FULL = 0.1, 0.5
"""The same of cosines below 0, as parts of the usual one."""
DEBT_MOST = 3 * THOUSAND
"""Most that a node owes; a whole fault adds a thousand."""
RELIEF = 100
"""What a round without a fault pays off."""
RELIEF_LEAST = 0.2
"""The part of it that a round pays off in which nothing is left to gain."""
DEBT_FROM, DEBT_ALL = 300, 700
"""Debts that take nothing, and all pay."""


class PayShares(NamedTuple):
    """What the updates of a round earn."""

    shares: dict[NodeId, float]
    """In [0, 1], of each update."""
    reasons: dict[NodeId, str]
    """Why one is not 1."""
    memory: PayMemory
    """After the round."""


class _Part(NamedTuple):
    """One measure of an update, as a part of the usual."""

    value: float
    clearness: float
    """How much it tells, in [0, 1]."""

    @property
    def now(self) -> float:
        """Nearer to 1 the less it tells."""
        return 1 + self.clearness * (self.value - 1)


_Parts = dict[NodeId, _Part]


class _Trials(NamedTuple):
    """What trying the round's updates showed."""

    gains: _Parts
    faults: dict[NodeId, float]
    """How clearly each update made its own samples worse, in [0, 1]."""
    left: float
    """How much there is left to gain, in [0, 1]."""
    fall_most: float


def pay_shares(
    memory: PayMemory,
    own: Mapping[NodeId, OwnEvidence],
    honesty: Mapping[NodeId, float],
    steepest: float,
    looks: Mapping[NodeId, int],
) -> PayShares:
    """Judge what the updates of a closed round earn.

    Args:
        memory: What earlier rounds taught.
        own: Evidence of each update that was measured; the memory judges the others.
        honesty: How far each node is believed after the round, in [0, 1].
        steepest: The longest usual gradient of late.
        looks: How many rounds the look at each stands for.
    """
    if len(own) < NODES_LEAST:
        own = {}
    others = {node: _known_limit(memory, node) for node in honesty if node not in own}
    if not own:
        return _with_reasons(others, memory)
    trust = {
        node: max(TRUST_LEAST, min(honesty[node], _debt_share(memory.debts.get(node, 0))))
        for node in own
    }
    trials = _trials(memory, own, trust)
    cosines = _cosine_parts(own, trust, steepest, trials.left)
    averages = _averages(memory, [trials.gains, *cosines], looks)
    debts = _debts(memory, trials, cosines[0], looks)
    memory = _remember(memory, averages, debts, trials.fall_most)
    limits = {
        node: min(
            _trial_limit(trials.gains[node], each),
            _layer_limit([parts[node] for parts in cosines]),
            _known_limit(memory, node),
            key=lambda limit: limit[0],
        )
        for node, each in own.items()
    }
    return _with_reasons({**limits, **others}, memory)


def known_pay(memory: TrustMemory, nodes: Sequence[NodeId]) -> dict[NodeId, int]:
    """Shares of full pay, in 1/65,536, by what is known of the nodes already, for updates that
    nothing was found of.
    """
    votes = known_votes(memory, nodes)
    if memory.pay is None:
        return votes
    shares = {node: _known_limit(memory.pay, node)[0] for node in nodes}
    return {node: min(vote, int(WHOLE * shares[node])) for node, vote in votes.items()}


_Limit = tuple[float, str]
"""The share that some evidence leaves, and why it is not 1."""


def _with_reasons(limits: Mapping[NodeId, _Limit], memory: PayMemory) -> PayShares:
    return PayShares(
        {node: share for node, (share, _) in limits.items()},
        {node: reason for node, (share, reason) in limits.items() if share < 1},
        memory,
    )


def _known_limit(memory: PayMemory, node: NodeId) -> _Limit:
    """What the memory alone leaves."""
    debt_share = _debt_share(memory.debts.get(node, 0))
    return min(
        _average_limit(min(memory.averages.get(node, ()), default=THOUSAND) / THOUSAND),
        (debt_share, "it still owes for updates that made its samples worse"),
        key=lambda limit: limit[0],
    )


def _layer_limit(parts: Sequence[_Part]) -> _Limit:
    least = min(part.now for part in parts)
    reason = f"its worst layers do {least:.2f} of the usual for samples of its own shard"
    return ramp(least, LAYER_FROM, LAYER_FULL), reason


def _trial_limit(gain: _Part, own: OwnEvidence) -> _Limit:
    share = ramp(gain.now, GAIN_FROM, GAIN_FULL)
    if own.loss is None or own.loss_after is None:
        return 1.0, ""
    return share, (
        f"it takes the loss of samples of its own shard from {own.loss:.3g} to"
        f" {own.loss_after:.3g}, which is {gain.value:.2f} of the usual"
    )


def _average_limit(average: float) -> _Limit:
    reason = f"over rounds its updates do {average:.2f} of the usual for samples of its own shards"
    return ramp(average, AVERAGE_FROM, AVERAGE_FULL), reason


def _debt_share(debt: int) -> float:
    return 1 - ramp(debt, DEBT_FROM, DEBT_ALL)


def _cosine_parts(
    own: Mapping[NodeId, OwnEvidence],
    trust: Mapping[NodeId, float],
    steepest: float,
    left: float,
) -> list[_Parts]:
    """Cosines of whole updates as parts of the usual one, then those of each group of layers."""
    power = {
        node: left * min(1.0, each.steepness / (POWER_FULL * steepest)) if steepest > 0 else 0.0
        for node, each in own.items()
    }
    groups = range(min(len(each.layers) for each in own.values()))
    kinds = [{node: each.cosine for node, each in own.items()}]
    kinds += [{node: each.layers[group] for node, each in own.items()} for group in groups]
    parts: list[_Parts] = []
    for cosines in kinds:
        usual = usual_cosine(cosines, trust)
        parts.append(
            {
                node: _Part(
                    _part_in_bounds(cosine / max(usual.cosine, COSINE_LEAST)),
                    usual.clearness * power[node],
                )
                for node, cosine in cosines.items()
            }
        )
    return parts


def _trials(
    memory: PayMemory, own: Mapping[NodeId, OwnEvidence], trust: Mapping[NodeId, float]
) -> _Trials:
    losses = {
        node: (each.loss, each.loss_after)
        for node, each in own.items()
        if each.loss is not None and each.loss_after is not None
    }
    gains, faults = dict.fromkeys(own, _Part(1.0, 0.0)), dict.fromkeys(own, 0.0)
    if len(losses) < NODES_LEAST:
        return _Trials(gains, faults, 1.0, memory.fall_most)
    usual_loss = weighted_median([(loss, trust[node]) for node, (loss, _) in losses.items()])
    fall = weighted_median([(loss - after, trust[it]) for it, (loss, after) in losses.items()])
    fall_most = max(memory.fall_most, fall)
    floor = LOSS_FLOOR * usual_loss + FALL_FLOOR * fall_most
    parts = {node: _gain(loss, after, floor) for node, (loss, after) in losses.items()}
    usual = weighted_median([(part, trust[node]) for node, part in parts.items()])
    if fall_most <= 0:
        return _Trials(gains, faults, 0.0, fall_most)
    what_is_left = min(1.0, max(0.0, fall) / (FALL_CLEAR * fall_most))
    clearness = min(what_is_left, max(0.0, usual) / GAIN_CLEAR)
    for node, part in parts.items():
        gains[node] = _Part(_part_in_bounds(part / max(usual, GAIN_LEAST)), clearness)
        loss, after = losses[node]
        harm = ramp((after - loss) / fall_most, HARM_FROM, HARM_FULL)
        faults[node] = max(harm, clearness * ramp(-part, WORSE_FROM, WORSE_FULL))
    return _Trials(gains, faults, what_is_left, fall_most)


def _gain(loss: float, after: float, floor: float) -> float:
    """What an update takes off a loss, as a part of the larger one, in [-1, 1]."""
    return -1.0 if after == math.inf else (loss - after) / (max(loss, after) + floor)


def _part_in_bounds(part: float) -> float:
    return min(PART_MOST, max(-PART_MOST, part))


def _averages(
    memory: PayMemory, kinds: Sequence[_Parts], looks: Mapping[NodeId, int]
) -> dict[NodeId, list[float]]:
    """Each node's averages over rounds, in the order of the kinds of evidence."""
    averages = {}
    for node in kinds[0]:
        before = [part / THOUSAND for part in memory.averages.get(node, ())] or [1.0] * len(kinds)
        averages[node] = [
            average
            + _rate_of_look(AVERAGE_RATE * parts[node].clearness, looks[node])
            * (parts[node].value - average)
            for average, parts in zip(before, kinds, strict=True)
        ]
    return averages


def _rate_of_look(rate: float, rounds: int) -> float:
    """By how much a look moves an average, where each round would have moved it by ``rate``."""
    return rate if rounds == 1 else float(1 - (1 - rate) ** min(LOOK_OF_AVERAGES_MOST, rounds))


def _debts(
    memory: PayMemory, trials: _Trials, cosines: _Parts, looks: Mapping[NodeId, int]
) -> dict[NodeId, int]:
    debts = {}
    for node, worse in trials.faults.items():
        cosine = cosines[node]
        against = cosine.clearness * ramp(-cosine.value, AGAINST_FROM, AGAINST_FULL)
        fault = max(worse, against)
        relief = RELIEF * (1 - fault) * max(trials.left, RELIEF_LEAST)
        debt = memory.debts.get(node, 0) + round(looks[node] * (THOUSAND * fault - relief))
        debts[node] = min(DEBT_MOST, max(0, debt))
    return debts


def _remember(
    memory: PayMemory,
    averages: Mapping[NodeId, Sequence[float]],
    debts: Mapping[NodeId, int],
    fall_most: float,
) -> PayMemory:
    thousandths = {
        node: tuple(round(THOUSAND * part) for part in parts) for node, parts in averages.items()
    }
    debts = {node: debt for node, debt in {**memory.debts, **debts}.items() if debt}
    return replace(
        memory,
        averages={**memory.averages, **thousandths},
        debts=debts,
        fall_most=fall_most,
    )

"""Secret duplicates: now and then two nodes train the same shard, and their updates are compared.

Theory of operation. A draw that follows from a secret of the coordinator is journalled with each
model; the next round opens by it, so that a replay opens it the same. Each node is checked at a
rate by what is known of it: another is drawn for it, and it gets that one's shard. Where their work
differs both do the lesser one, and a node that says it is fast has to be in sooner
(`plan.common_work`). Otherwise an assignment looks the same with and without: both
nodes keep their inner state, as a fresh start would tell them.

Two honest updates of one shard are far more alike than two of different shards; how much differs
from job to job, so that they are held against the job's pairs of before. A mismatch does not tell
who lied: it speaks against a stranger more than against a node that earlier pairs speak for.
Doubts lower a node's vote, and pairs that match take them away again.

The shard of a lease over several rounds goes to a node of the round that opens with it, which is in
sooner: its update is kept, and compared once the lease's own is folded.

Who is given fewer steps than usual may guess why, and leave. So whoever did less and was not
compared after all is checked in its next round, until it is.
"""

from collections.abc import Mapping, Sequence, Set
from math import log1p, sqrt
from statistics import median
from typing import NamedTuple

from blake3 import blake3
from msgspec.structs import replace

from coordinator.core.training.job.state import Participant, Round
from coordinator.core.training.job.trust_memory import DuplicateMemory, Weighing
from coordinator.core.training.plan.common_work import (
    is_lesser,
    is_timed,
    is_too_slow,
    is_work_equal,
)
from coordinator.core.training.plan.decision import NodePlan
from coordinator.core.training.trust.weights import WHOLE
from coordinator.core.work.leases import WorkState
from hypergpu.ids import NodeId
from hypergpu.units import Milliseconds

RATE_TRUSTED, RATE_STRANGER, RATE_DOUBTED = 0.015, 0.08, 0.25
"""Checks of a node a round."""
TRUSTED_FROM = 2
"""Pairs that matched, with no doubt left."""
TRUSTED_RATIO = 2
"""A trusted partner is preferred where one of both does at most so many times the other's work."""
PARTICIPANTS_LEAST = 4
"""With fewer participants each duplicate costs too much of a round."""
LIKENESS_PART = 0.6
"""An honest pair is at least so many times as alike as the usual one of the job's last ones."""
USUAL_QUANTILE = 0.75
"""Which of them is the usual one. Of three liars in ten half of all pairs have one: by the median
no pair would tell anything.
"""
USUAL_LEAST = 0.6
"""Where the usual pair is less alike, no pair tells anything: what nodes kept from earlier rounds
outweighs the shard, as with rounds of one step or with sparse codecs. 0: as two updates of
different shards; 1: equal.
"""
PAIRS_LEAST, PAIRS_KEPT = 3, 33
"""Pairs of the job that others are held against: none before there are so many, then the newest."""
DOUBT_MOST = 24
"""With so many doubts a node has no vote."""
AGAINST_TRUSTED, AGAINST_STRANGER, OF_TRUSTED, RELIEF = 8, 4, 1, 4
"""What a mismatch adds: to a node with a trusted partner, with another, to a trusted one; and what
a match takes away.
"""
AGAINST_SLOW = 12
"""What it adds that a node took longer than it says: by the coordinator's own clock, whoever the
partner is.
"""


class RoundWorker(NamedTuple):
    """A node of a round that is about to open."""

    node: NodeId
    plan: NodePlan
    has_begun: bool
    """Whether it took some of its steps before: nobody else can repeat them."""
    is_long: bool = False
    """Whether it works under a lease over several rounds: its shard goes to a node of the round,
    never another's to it.
    """
    experts: tuple[int, ...] = ()
    """Experts of a mixture that it holds; none: all. Updates of unequal ones are not alike."""


class ComparedPair(NamedTuple):
    """The updates of one shard."""

    nodes: tuple[NodeId, NodeId]
    likeness: float
    """0: as two updates of different shards; 1: equal."""


def is_trusted(memory: DuplicateMemory, node: NodeId) -> bool:
    """Whether earlier pairs speak for the node."""
    return memory.matches.get(node, 0) >= TRUSTED_FROM and not memory.doubts.get(node, 0)


def check_rate(memory: DuplicateMemory, node: NodeId, work_share: float) -> float:
    """How often the node is checked, a part of its rounds; never 0.

    Args:
        memory: What earlier pairs taught.
        node: Whose rate it is.
        work_share: Its inner steps over the median node's, at least 1 but for a lease over several
            rounds: who is paid more is checked more; of strangers by the root of it, as each check
            costs as much work.
    """
    if node in memory.due:
        return 1.0
    if memory.doubts.get(node, 0):
        return RATE_DOUBTED
    trusted_rate, stranger = RATE_TRUSTED * work_share, RATE_STRANGER * sqrt(work_share)
    return min(RATE_DOUBTED, trusted_rate if is_trusted(memory, node) else stranger)


def draw_duplicates(
    draw: str, memory: DuplicateMemory, workers: Sequence[RoundWorker], stated_batch: int
) -> dict[NodeId, NodeId]:
    """Who gets whose shard instead of one of its own.

    Args:
        draw: The round's draw; empty: there is none, and no duplicate.
        memory: What earlier pairs taught.
        workers: The round's nodes, in slot order.
        stated_batch: The job's.
    """
    free = [each for each in workers if not each.has_begun]
    free.sort(key=lambda each: each.node not in memory.due)
    most = len(workers) // PARTICIPANTS_LEAST if draw else 0
    awaited_steps = [each.plan.inner_steps for each in workers if not each.is_long]
    usual = median(awaited_steps) if awaited_steps else 1
    partners: dict[NodeId, NodeId] = {}
    for own in tuple(free):
        if len(partners) == most or own not in free:
            continue
        work_share = own.plan.inner_steps / usual
        work_share = work_share if own.is_long else max(1.0, work_share)
        if _chance(draw, "check", own.node) >= check_rate(memory, own.node, work_share):
            continue
        others = [
            each
            for each in free
            if each != own
            and not each.is_long
            and each.experts == own.experts
            and _can_pair(own.plan, each.plan, stated_batch)
        ]
        trusted_workers = [
            each
            for each in others
            if is_trusted(memory, each.node) and _work_ratio(own, each) <= TRUSTED_RATIO
        ]
        if others:
            partner = min(trusted_workers or others, key=lambda it: _distance(draw, own, it))
            repeater, other = (partner, own) if own.is_long else (own, partner)
            partners[repeater.node] = other.node
            free = [each for each in free if each not in (own, partner)]
    return partners


def _can_pair(first: NodePlan, second: NodePlan, stated_batch: int) -> bool:
    """Lesser work than was planned is given to nobody of whom nothing is forecast."""
    is_known = first.forecast_ms > 0 and second.forecast_ms > 0
    return is_known or is_work_equal(first, second, stated_batch)


def _distance(draw: str, own: RoundWorker, other: RoundWorker) -> float:
    """The nearest partner is drawn: the less work is left undone, the likelier."""
    return -log1p(-_chance(draw, own.node, other.node)) * _work_ratio(own, other) ** 2


def _work_ratio(own: RoundWorker, other: RoundWorker) -> float:
    less, more = sorted((own.plan.inner_steps, other.plan.inner_steps))
    return more / less


def _chance(draw: str, *names: str) -> float:
    octets = blake3("/".join((draw, *names)).encode()).digest(7)
    return (int.from_bytes(octets, "big") >> 3) / (1 << 53)


def judge_pairs(
    weighing: Weighing,
    pairs: Sequence[ComparedPair],
    slow: Set[NodeId] = frozenset(),
    timed: Set[NodeId] = frozenset(),
) -> Weighing:
    """Hold pairs against those of before; then lower the votes of nodes that are in doubt.

    Args:
        weighing: By everything else.
        pairs: Of the round, as far as both updates are in.
        slow: Nodes that were slower than they say. Their pairs speak for neither.
        timed: Nodes that had to be in sooner than usual. A match of theirs counts twice.
    """
    memory = weighing.memory.duplicates
    doubts = dict.fromkeys(slow, "compared with a slower node, it was not as fast as it says")
    for node in sorted(slow):
        memory = _with_doubts(memory, node, AGAINST_SLOW)
    for pair in pairs:
        limit = 0.0 if any(node in slow for node in pair.nodes) else _limit(memory)
        if limit and pair.likeness >= limit:
            memory = _after_match(memory, pair, timed)
        elif limit:
            doubt_text = f"a duplicate of its shard gave another update: {pair.likeness:.2f} alike"
            doubts |= dict.fromkeys(pair.nodes, f"{doubt_text}, at least {limit:.2f} is usual")
            memory = _after_mismatch(memory, pair)
        memory = replace(memory, likeness=(*memory.likeness, pair.likeness)[-PAIRS_KEPT:])
    trust = replace(weighing.memory, duplicates=memory)
    return _with_doubted_votes(replace(weighing, memory=trust), doubts)


def _with_doubted_votes(weighing: Weighing, doubts: Mapping[NodeId, str]) -> Weighing:
    """The weighing with lower votes and pay of nodes in doubt; ``doubts`` are the round's."""
    reasons, votes = {**weighing.reasons}, {**weighing.votes}
    pay, pay_reasons = {**(weighing.pay or {})}, {**weighing.pay_reasons}
    for node, doubt in weighing.memory.duplicates.doubts.items():
        if not doubt:
            continue
        doubt_text = doubts.get(node) or "duplicates of its shards gave other updates"
        for shares, why in ((votes, reasons), (pay, pay_reasons)):
            shares[node] = shares.get(node, WHOLE) * max(0, DOUBT_MOST - doubt) // DOUBT_MOST
            why[node] = "; ".join(each for each in (why.get(node, ""), doubt_text) if each)
    if weighing.pay is None:
        return replace(weighing, votes=votes, reasons=reasons)
    return replace(weighing, votes=votes, reasons=reasons, pay=pay, pay_reasons=pay_reasons)


def _limit(memory: DuplicateMemory) -> float:
    """The least likeness of a match; 0: pairs tell nothing in this job, or not yet."""
    if len(memory.likeness) < PAIRS_LEAST:
        return 0.0
    usual = sorted(memory.likeness)[round(USUAL_QUANTILE * (len(memory.likeness) - 1))]
    return LIKENESS_PART * usual if usual >= USUAL_LEAST else 0.0


def _after_match(
    memory: DuplicateMemory, pair: ComparedPair, timed: Set[NodeId]
) -> DuplicateMemory:
    counts = {node: 2 if node in timed else 1 for node in pair.nodes}
    matches = {node: memory.matches.get(node, 0) + count for node, count in counts.items()}
    doubts = {node: max(0, memory.doubts.get(node, 0) - RELIEF) for node in pair.nodes}
    return replace(
        memory,
        matches={**memory.matches, **matches},
        doubts={node: doubt for node, doubt in {**memory.doubts, **doubts}.items() if doubt},
    )


def _after_mismatch(memory: DuplicateMemory, pair: ComparedPair) -> DuplicateMemory:
    trust_by_node = {node: is_trusted(memory, node) for node in pair.nodes}
    for node, other in (pair.nodes, pair.nodes[::-1]):
        against = AGAINST_TRUSTED if trust_by_node[other] else AGAINST_STRANGER
        is_alone = trust_by_node[node] and not trust_by_node[other]
        memory = _with_doubts(memory, node, OF_TRUSTED if is_alone else against)
    return memory


def _with_doubts(memory: DuplicateMemory, node: NodeId, count: int) -> DuplicateMemory:
    doubt = min(DOUBT_MOST, memory.doubts.get(node, 0) + count)
    return replace(memory, doubts={**memory.doubts, node: doubt})


def without_doubts(memory: DuplicateMemory, node: NodeId) -> DuplicateMemory:
    """The memory with a node as a stranger."""
    return replace(
        memory,
        matches={each: count for each, count in memory.matches.items() if each != node},
        doubts={each: doubt for each, doubt in memory.doubts.items() if each != node},
        due=memory.due - {node},
    )


def with_due(memory: DuplicateMemory, closed: Round) -> DuplicateMemory:
    """The memory with the nodes that are to be checked in their next round, once one is closed."""
    unequal = incomparable_nodes(closed)
    pairs = () if closed.is_interrupted else closed.duplicates.items()
    checked_nodes = closed.slow.union(
        *(pair for pair in pairs if pair[0] not in unequal and _are_both_in(closed, pair))
    )
    parts = closed.participants.items()
    checked_nodes |= {node for node, part in parts if _is_compared_later(part) or part.duplicate}
    lesser = {node for node, part in parts if is_lesser(part.plan)}
    return replace(memory, due=(memory.due | lesser) - checked_nodes)


def _is_compared_later(part: Participant) -> bool:
    return part.repeats is not None and part.work is WorkState.RECEIVED


def _are_both_in(round_: Round, pair: tuple[NodeId, NodeId]) -> bool:
    return all(round_.participants[node].work is WorkState.RECEIVED for node in pair)


def incomparable_nodes(round_: Round) -> frozenset[NodeId]:
    """Nodes with the shard of another that divide its batches otherwise than that one: who ran out
    of memory divides them otherwise than it was told at first.
    """
    plans = {node: part.plan for node, part in round_.participants.items()}
    passes = {node: (it.micro_batch, it.checkpoints_activations) for node, it in plans.items()}
    return frozenset(
        own for own, other in round_.duplicates.items() if passes[own] != passes[other]
    )


def timed_nodes(round_: Round) -> frozenset[NodeId]:
    """Nodes of the round's pairs that had to be in sooner than usual; none after a pause or a
    restart.
    """
    nodes = () if round_.is_interrupted else (*round_.duplicates, *round_.duplicates.values())
    return frozenset(node for node in nodes if is_timed(round_.participants[node].plan))


def slow_nodes(round_: Round, now_ms: Milliseconds) -> frozenset[NodeId]:
    """Nodes that were slower than they say where they did less than they can. Where both of a pair
    were it is no fault of theirs, nor after a pause or a restart, or where one ran out of memory.
    """
    if round_.is_interrupted:
        return frozenset()
    slow, unequal = set(), incomparable_nodes(round_)
    pairs = [pair for pair in round_.duplicates.items() if pair[0] not in unequal]
    repeaters = (node for node, part in round_.participants.items() if part.repeats is not None)
    for node in (*repeaters, *(node for pair in pairs for node in pair)):
        part = round_.participants[node]
        elapsed_ms = part.took_ms or Milliseconds(now_ms - part.assigned_at_ms)
        if is_too_slow(part.plan, elapsed_ms):
            slow.add(node)
    return frozenset(node for node in slow if round_.partner(node) not in slow)


def shared_weights(weights: Mapping[NodeId, int], round_: Round) -> dict[NodeId, int]:
    """Weights by which a shard counts once: two updates of it have half the weight each, in one
    round or in two.
    """
    parts = ((node, round_.participants[node]) for node in weights)
    late = {node for node, part in parts if part.repeats is not None or part.duplicate}
    if not round_.duplicates and not late:
        return dict(weights)
    pairs = [pair for pair in round_.duplicates.items() if all(node in weights for node in pair)]
    halved_nodes = late.union(*pairs)
    return {
        node: weight if node in halved_nodes else 2 * weight for node, weight in weights.items()
    }

"""Which codec: the finest whose bytes a node's line carries in the time that they may take.

A round is dense or sparse by what most of its work needs: dense rounds step with momentum, sparse
ones without. Among dense updates some may be sparse, each by its own node's line.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import msgspec

from coordinator.core.training.plan.decision import FINEST, ModelSizes, NodeMemory, PlanMemory
from coordinator.core.training.plan.node_speed import NodeSpeed
from coordinator.core.training.plan.speeds import RoundSpeeds
from hypergpu.ids import NodeId
from hypergpu.jobfile.spec import CODECS, SPARSE_CODECS, JobSpec
from hypergpu.units import Bytes

_HOLD = 1.15
"""A level that fitted is kept until it overruns its budget by this much: noise is no reason."""
_ROOM = 0.8
"""A finer level has to fit into this share of its budget."""
_PATIENCE = 3
"""Plans in a row before a finer level is believed to fit."""
_SPARSE_FROM = 0.5
"""Share of the job's work that has to need sparse codecs before a round is sparse."""
_SPARSE_FROM_DENSE = 0.6
"""The same after a dense round: two equal nodes are always near a half."""
_DENSE_FROM = 0.25
"""Share that may still need them when rounds become dense again."""
SPARSE_MOST, _SPARSE_ANEW = 0.4, 0.3
"""Share of a round's work that may be sparse where other updates are dense; the second is for those
whose updates were dense before.
"""
_COMFORT = 4
"""Times the user's own H: beyond it the codec gives way before H does."""
SMALL_UPDATE_BYTES = Bytes(256 << 10)
"""A dense update up to here takes hardly longer than a sparse one on any line at home: what both
wait for are round trips. Sparse ones take 1.4 to 1.5 times the samples (docs/log.md, 2026-11-29).
Measured with plain outer steps; with momentum late dense updates of few nodes overshoot.
"""
_OVERRUN = 1.5
"""A node whose line is worse than the middle one's takes fewer steps before a sparser codec."""


class CodecFamily(msgspec.Struct, frozen=True):
    """The levels that a round chooses from, the finest first."""

    levels: tuple[str, ...]
    is_sparse: bool
    dense_rounds: int = 0


class RoundCodecs(NamedTuple):
    """Codecs that the shape of a round is worked out with."""

    family: CodecFamily
    down: str
    """Codec of the delta."""
    nodes: Mapping[NodeId, str]
    """Codec of each node whose work shapes the round."""


def round_codecs(
    speeds: RoundSpeeds,
    reference: Mapping[NodeId, NodeSpeed],
    weights: Mapping[NodeId, float],
    *,
    step_us: float,
    most_steps: int,
) -> RoundCodecs:
    """The codecs that a round is shaped with.

    Args:
        speeds: Of all candidates.
        reference: Of the nodes whose work shapes the round.
        weights: What each of these can add, see `capacities`.
        step_us: A step of the middle node.
        most_steps: The largest H of the median node.
    """
    request, sizes = speeds.request, speeds.sizes
    spec, previous, utilisation = request.spec, request.previous, request.spec.aware.utilisation
    comfortable_us = step_us * min(most_steps, _COMFORT * spec.training.inner_steps)
    family = _round_family(
        spec, previous, reference, weights, sizes=sizes, computing_us=comfortable_us
    )
    down = (
        spec.codec.down
        if spec.aware.takes_as_stated("codec.down")
        else _delta_codec(
            family,
            reference,
            weights,
            sizes=sizes,
            allowed_us=(1 - utilisation) * comfortable_us,
            before=previous.down if previous is not None else "",
        )
    )
    before_us = step_us * (previous.inner_steps if previous is not None else 0)
    kept_us = _OVERRUN * max(comfortable_us, before_us)
    nodes = {
        node: _codec_for_span(
            family,
            speeds.memories.candidates[node],
            sizes,
            budget_bytes=byte_budget(speed, comfortable_us, utilisation),
            kept_bytes=byte_budget(speed, kept_us, utilisation),
        )
        for node, speed in reference.items()
    }
    return RoundCodecs(family, down, nodes)


def _round_family(
    spec: JobSpec,
    previous: PlanMemory | None,
    speeds: Mapping[NodeId, NodeSpeed],
    weights: Mapping[NodeId, float],
    *,
    sizes: ModelSizes,
    computing_us: float,
) -> CodecFamily:
    """The family of a round whose median node may compute for as long as ``computing_us``: by the
    share of the job's work whose line bears no dense codec.
    """
    levels, utilisation = allowed_codecs(spec, sizes), spec.aware.utilisation
    dense = tuple(level for level in levels if level not in SPARSE_CODECS)
    sparse = tuple(level for level in levels if level in SPARSE_CODECS)
    if not dense or not sparse:
        return CodecFamily(levels, is_sparse=not dense)
    if sizes.update_bytes[dense[0]] <= SMALL_UPDATE_BYTES and spec.outer.momentum == 0:
        return CodecFamily(dense, is_sparse=False)

    def share(slack: float) -> float:
        sparse_nodes = [
            node
            for node, speed in speeds.items()
            if finest_within(levels, sizes, slack * byte_budget(speed, computing_us, utilisation))
            in SPARSE_CODECS
        ]
        return sum(weights[node] for node in sparse_nodes) / sum(weights[node] for node in speeds)

    is_planned = previous is not None and previous.span_ms > 0
    if previous is None or not previous.is_sparse or not is_planned:
        least = _SPARSE_FROM_DENSE if is_planned else _SPARSE_FROM
        is_sparse = share(_HOLD if is_planned else 1.0) >= least
        return CodecFamily(sparse if is_sparse else levels, is_sparse)
    dense_rounds = previous.dense_rounds + 1 if share(_ROOM) < _DENSE_FROM else 0
    if dense_rounds >= _PATIENCE:
        return CodecFamily(levels, is_sparse=False)
    return CodecFamily(sparse, is_sparse=True, dense_rounds=dense_rounds)


def allowed_codecs(spec: JobSpec, sizes: ModelSizes) -> tuple[str, ...]:
    """From int4 to the sparsest that the job's user allows, or the one that the job states.

    Nothing is finer than int4: int8 takes twice the bytes and trains no better.
    """
    if spec.aware.takes_as_stated("codec.up"):
        return (spec.codec.up,)
    first, last = CODECS.index(FINEST), CODECS.index(spec.aware.sparsest)
    return tuple(codec for codec in CODECS[first : last + 1] if codec in sizes.update_bytes)


def finest_within(levels: Sequence[str], sizes: ModelSizes, budget_bytes: float) -> str:
    """The first level whose update fits, or the last level if none does."""
    fitting_levels = (level for level in levels if sizes.update_bytes[level] <= budget_bytes)
    return next(fitting_levels, levels[-1])


def byte_budget(speed: NodeSpeed, computing_us: float, utilisation: float) -> Bytes:
    """Bytes of an update whose upload takes at most ``1 - utilisation`` of the computing that it
    reports on (Kimad, arXiv:2312.08053).
    """
    return Bytes(int((1 - utilisation) * computing_us * speed.cautious_up_bits_per_s / 8e6))


def _delta_codec(
    family_: CodecFamily,
    speeds: Mapping[NodeId, NodeSpeed],
    weights: Mapping[NodeId, float],
    *,
    sizes: ModelSizes,
    allowed_us: float,
    before: str,
) -> str:
    """Codec of the delta: int4, but sparse when the round is and one node in four
    would wait for a dense one for longer than ``allowed_us``.
    """
    sparse = SPARSE_CODECS[0]
    if not family_.is_sparse or sparse not in sizes.update_bytes:
        return FINEST
    dense_bytes = sizes.update_bytes[FINEST]
    slack = _ROOM if before == sparse else _HOLD if before else 1.0
    waiting_weight = sum(
        weights[node]
        for node, speed in speeds.items()
        if speed.down_us(dense_bytes) > slack * allowed_us
    )
    return sparse if 4 * waiting_weight >= sum(weights[node] for node in speeds) else FINEST


def _codec_for_span(
    family_: CodecFamily,
    memory: NodeMemory,
    sizes: ModelSizes,
    *,
    budget_bytes: Bytes,
    kept_bytes: Bytes,
) -> str:
    """The codec that the span of a round is worked out with: the node's last one as long as it may
    be kept, so that noise at the edge of a budget moves no round; else the one that fits.

    Args:
        family_: Of the round.
        memory: Of the node.
        sizes: Of codecs.
        budget_bytes: For a codec that is chosen afresh.
        kept_bytes: For the node's last one, no less.
    """
    is_kept = memory.codec in family_.levels
    if is_kept and sizes.update_bytes[memory.codec] <= _HOLD * kept_bytes:
        return memory.codec
    return node_codec(family_, memory, sizes, budget_bytes)[0]


def node_codecs(
    family_: CodecFamily,
    speeds: RoundSpeeds,
    weights: Mapping[NodeId, float],
    *,
    computing_us: float,
) -> dict[NodeId, tuple[str, int]]:
    """The codec of each candidate by its own line, and how many plans in a row have seen room for a
    finer one.

    In a dense round sparse codecs go to those who need them most, up to `SPARSE_MOST` of the work.

    Args:
        family_: Of the round.
        speeds: Of the candidates.
        weights: What each can add to a round; a node without a weight counts as a newcomer, for
            nothing.
        computing_us: Time that the median node computes.
    """
    memories, utilisation = speeds.memories.candidates, speeds.request.spec.aware.utilisation
    budgets = {
        node: byte_budget(speed, _OVERRUN * computing_us, utilisation)
        for node, speed in speeds.nodes.items()
    }
    codecs = {
        node: node_codec(family_, memory, speeds.sizes, budgets[node])
        for node, memory in memories.items()
    }
    if family_.is_sparse:
        return codecs
    dense = tuple(level for level in family_.levels if level not in SPARSE_CODECS)
    if not dense:
        return codecs
    whole, sparse_weight = sum(weights.values()), 0.0
    anew = {node: memories[node].codec not in SPARSE_CODECS for node in memories}
    sparse = [node for node, (codec, _) in codecs.items() if codec in SPARSE_CODECS]
    for node in sorted(sparse, key=lambda node: (anew[node], budgets[node], node)):
        most = whole * (_SPARSE_ANEW if anew[node] else SPARSE_MOST)
        if sparse_weight + weights.get(node, 0.0) > most:
            codecs[node] = (dense[-1], 0)
        else:
            sparse_weight += weights.get(node, 0.0)
    return codecs


def node_codec(
    family_: CodecFamily, memory: NodeMemory, sizes: ModelSizes, budget_bytes: Bytes
) -> tuple[str, int]:
    """A node's codec and how many plans in a row have seen room for a finer one.

    A sparser one comes at once, a finer one after three plans.
    """
    levels = family_.levels
    fitting_level = finest_within(levels, sizes, budget_bytes)
    if memory.codec not in levels:
        return fitting_level, 0
    before = levels.index(memory.codec)
    if levels.index(finest_within(levels, sizes, budget_bytes * _HOLD)) > before:
        return fitting_level, 0
    roomy = finest_within(levels, sizes, budget_bytes * _ROOM)
    if levels.index(roomy) >= before:
        return memory.codec, 0
    if memory.lighter_rounds + 1 >= _PATIENCE:
        return roomy, 0
    return memory.codec, memory.lighter_rounds + 1

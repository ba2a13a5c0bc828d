"""From the sketches of a closed round's updates and the gradient of the held-out loss to the
updates' weighing. Pure: what is awaited and stored is the business of the caller.
"""

import math
from collections.abc import Mapping, Sequence
from statistics import median
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from msgspec.structs import replace

from coordinator.core.training.job.commands import DuplicatedShards
from coordinator.core.training.job.trust_memory import TrustMemory, Weighing
from coordinator.core.training.trust.duplicates import judge_pairs
from coordinator.core.training.trust.noise import judge_noise
from coordinator.core.training.trust.own_evidence import OwnEvidence
from coordinator.core.training.trust.own_samples import weigh_by_own_samples
from coordinator.core.training.trust.weights import (
    WHOLE,
    UpdateEvidence,
    blame,
    weigh_updates,
    whole_weighing,
)
from coordinator.shell.aggregation.layer_groups import HeldGroups
from coordinator.shell.aggregation.likeness import compare_pairs, distances_of, without_pairs
from coordinator.shell.aggregation.measurements import HeldOutGradient, OwnGradient, UpdateTrial
from coordinator.shell.aggregation.repeats import find_repeats, remember
from coordinator.shell.aggregation.sketch import COSINE_ERROR, Sketch, UpdateSketch
from hypergpu.ids import NodeId

_NO_DUPLICATES = DuplicatedShards()
_COPY_SHARE = 0.25
"""Updates nearer to each other than this part of the usual distance to the nearest are copies."""
_COPY_LEAST = 1e-6
"""Cosines of equal sketches differ from 1 by rounding only."""


class SketchedUpdate(NamedTuple):
    """An update that was measured."""

    node: NodeId
    inner_steps: int
    measured: UpdateSketch
    is_sparse: bool = False
    """Whether its codec is a sparse one."""
    common_norms: Mapping[NodeId, float] = {}
    """Its length over the coordinates that each sparse update sends; none of a sparse one, or where
    there are enough of both kinds to be compared by themselves.
    """

    own: OwnGradient | None = None
    """Gradient of samples of its own shard; None: it was not measured."""
    trial: UpdateTrial | None = None
    """Losses of the same samples; None: the update was not tried."""
    held: HeldGroups | None = None
    """Groups of layers that it covers; None: all."""

    def part_beside(self, other: "SketchedUpdate") -> float:
        """Part of its length that is in the coordinates that both updates send."""
        norm = self.measured.norm
        return self.common_norms.get(other.node, norm) / norm if norm > 0 else 1.0


def weigh_sketched(
    memory: TrustMemory,
    rule: str,
    found: Sequence[SketchedUpdate],
    gradient: HeldOutGradient | None,
    duplicates: DuplicatedShards = _NO_DUPLICATES,
    earlier: Mapping[NodeId, SketchedUpdate] | None = None,
) -> Weighing:
    """Weigh a round's updates by a rule of the job file's ``trust``.

    Args:
        memory: What earlier rounds taught.
        rule: ``robust`` or ``mean``.
        found: The round's updates.
        gradient: Of the held-out loss, where it is known.
        duplicates: Whose update is of whose shard, besides that one's own.
        earlier: Those of ``duplicates.earlier`` that could be measured.
    """
    if gradient is not None and gradient.loss is not None:
        memory = replace(memory, loss=gradient.loss, rollbacks=0)
    if rule != "robust":
        return whole_weighing(memory)
    evidence = without_pairs(evidence_of(found, gradient), duplicates.pairs)
    sound = {each.node: each.measured.sketch for each in found if each.measured.is_sound}
    worked_sketches = {node: sketch for node, sketch in sound.items() if sketch.any()}
    # Who was asked for what another had sent before repeats nothing: the pair is compared.
    repeats = find_repeats(memory.fingerprints, worked_sketches) - duplicates.earlier.keys()
    evidence = [replace(each, is_repeat=each.node in repeats) for each in evidence]
    memory = replace(memory, fingerprints=remember(memory.fingerprints, worked_sketches, repeats))
    if memory.by_own_samples:
        weighing = weigh_by_own_samples(memory, evidence, COSINE_ERROR)
        weighing = _within_pay(weighing, [each.node for each in found if each.held is not None])
    else:
        weighing = judge_noise(weigh_updates(memory, evidence), evidence, COSINE_ERROR)
    late = {
        node: (other.node, other.measured.sketch)
        for node, other in (earlier or {}).items()
        if other.measured.is_sound
    }
    sparse = {each.node for each in found if each.is_sparse}
    pairs = compare_pairs(sound, duplicates.pairs, sparse, late)
    comparable = [pair for pair in pairs if pair.nodes[0] not in duplicates.incomparable]
    return judge_pairs(weighing, comparable, duplicates.slow, duplicates.timed)


def _within_pay(weighing: Weighing, nodes: Sequence[NodeId]) -> Weighing:
    """The weighing in which updates of some experts count no more than they are paid: who has an
    expert alone, or with one other, is not outvoted there, and its trials tell more than cosines.
    """
    pay = weighing.pay_shares
    votes = dict(weighing.votes)
    for node in nodes:
        if (share := pay.get(node, WHOLE)) < votes.get(node, WHOLE):
            votes[node] = share
    return replace(weighing, votes=votes)


def weigh_rollback(
    memory: TrustMemory,
    makers: Sequence[SketchedUpdate],
    gradient: HeldOutGradient,
    base_round: int,
) -> Weighing:
    """Take their votes from the makers of a model that is of no use, and go back.

    Args:
        memory: What earlier rounds taught.
        makers: Updates that the model was made of.
        gradient: At that model.
        base_round: The model's round.
    """
    memory, suspects = blame(memory, evidence_of(makers, gradient))
    loss_text = "is not finite" if gradient.loss is None else f"is {gradient.loss:.4g}"
    reason = f"its update raised the held-out loss of the model of round {base_round}"
    return Weighing(
        clips={},
        votes=dict.fromkeys(suspects, 0),
        reasons=dict.fromkeys(suspects, reason),
        memory=memory,
        rollback=f"the held-out loss of the model of round {base_round} {loss_text}",
    )


def evidence_of(
    found: Sequence[SketchedUpdate], gradient: HeldOutGradient | None
) -> list[UpdateEvidence]:
    """Hold each update against the gradient, and against the others for copies."""
    slope = gradient.sketch if gradient is not None else None
    steepness = float(np.sqrt(np.square(slope).sum())) if slope is not None else 0.0
    distances = _distances(found)
    groups, cosines = copies(distances), 1 - distances.min(axis=1, initial=1.0)
    evidence = []
    for each, group, nearest in zip(found, groups, cosines.tolist(), strict=True):
        own = each.measured
        length = float(np.sqrt(np.square(own.sketch).sum()))
        gain = float((own.sketch * slope).sum()) if slope is not None and own.is_sound else 0.0
        is_known = own.is_sound and steepness > 0
        reach = steepness * _gradient_part(each, found)
        evidence.append(
            UpdateEvidence(
                node=each.node,
                inner_steps=each.inner_steps,
                norm=own.norm,
                statistics_norm=own.statistics_norm,
                influence=(gain / (length * reach) if length else 0.0) if is_known else None,
                gain=gain,
                nearest=nearest,
                group=group,
                is_sound=own.is_sound,
                is_sparse=each.is_sparse,
                common_norms=dict(each.common_norms),
                own=own_evidence(own, each.own, each.trial, each.held),
            )
        )
    return evidence


def own_evidence(
    update: UpdateSketch,
    gradient: OwnGradient | None,
    trial: UpdateTrial | None = None,
    held: HeldGroups | None = None,
) -> OwnEvidence | None:
    """Hold an update against the gradient of its own samples; None: one of them is of no use.

    An update of some experts is held against what it covers of the gradient. Layer by layer that is
    what all updates cover, and then its experts together, which can be compared with those of
    holders of others. One by one experts are not: some get few of the samples' tokens.
    """
    if gradient is None or not (gradient.is_finite and update.is_sound):
        return None
    layers = gradient.layers
    whole = layers.sum(axis=0) if held is None else layers[held.all].sum(axis=0)
    cosines = tuple(map(_cosine, update.layers, layers))
    if held is not None:
        own = list(held.experts)
        together = _cosine(update.layers[own].sum(axis=0), layers[own].sum(axis=0))
        cosines = (*cosines[: held.shared_count], together)
    # A base whose loss is not finite tells nothing of updates.
    known_trial = trial if trial is not None and math.isfinite(trial.loss) else None
    return OwnEvidence(
        cosine=_cosine(update.sketch, whole),
        layers=cosines,
        steepness=float(np.sqrt(np.square(whole).sum())),
        loss=known_trial.loss if known_trial else None,
        loss_after=known_trial.loss_after if known_trial else None,
    )


def _cosine(one: Sketch, other: Sketch) -> float:
    length = float(np.sqrt(np.square(one).sum() * np.square(other).sum()))
    return float((one * other).sum()) / length if length > 0 else 0.0


def _distances(found: Sequence[SketchedUpdate]) -> npt.NDArray[np.float64]:
    """``1 - cosine`` of each two updates, over the coordinates that both send."""
    distances = distances_of([each.measured.sketch for each in found])
    if not any(each.common_norms for each in found):
        return distances
    for row, own in enumerate(found):
        for column, other in enumerate(found):
            part = own.part_beside(other) * other.part_beside(own)
            if row != column and part > 0:
                distances[row, column] = 1 - min(1.0, (1 - distances[row, column]) / part)
    return distances


def _gradient_part(own: SketchedUpdate, found: Sequence[SketchedUpdate]) -> float:
    """Part of the gradient that is in a sparse update's coordinates, as dense updates have it
    there; 1 where all are alike.
    """
    parts = [each.part_beside(own) for each in found if own.node in each.common_norms]
    return median(parts) or 1.0 if own.is_sparse and parts else 1.0


def copies(distances: npt.NDArray[np.float64]) -> list[int]:
    """Number the groups of updates that are copies of each other, from 1; 0 is in none.

    Independent work on different samples keeps a distance, ``1 - cosine``, that is much alike for
    all of a round. Copies are far nearer, whatever noise or rounding lies between them.
    """
    if len(distances) < 3:
        return [0] * len(distances)
    usual = float(np.median(distances.min(axis=1)))
    return _groups(distances < max(_COPY_LEAST, _COPY_SHARE * usual))


def _groups(is_near: npt.NDArray[np.bool_]) -> list[int]:
    """Number each set of rows that are near each other, directly or by others."""
    numbers, number = [0] * len(is_near), 0
    for start in range(len(is_near)):
        if numbers[start] or not is_near[start].any():
            continue
        number += 1
        stack = [start]
        while stack:
            row = stack.pop()
            if not numbers[row]:
                numbers[row] = number
                stack += np.flatnonzero(is_near[row]).tolist()
    return numbers


def agreement_of(found: Sequence[SketchedUpdate], weighing: Weighing) -> float | None:
    """How far updates that count point the same way: ``|sum|^2 / sum of |u|^2``."""
    counted_sketches = [
        each.measured.sketch
        for each in found
        if each.measured.is_sound and weighing.votes.get(each.node, 1)
    ]
    squares = float(sum(np.square(each).sum() for each in counted_sketches))
    if len(counted_sketches) < 2 or not squares > 0:
        return None
    return float(np.square(np.sum(counted_sketches, axis=0)).sum()) / squares

"""Defences of the literature against backdoors, tried on top of the product's rule.

Those of a round change the updates before they are folded; those of the end change the model that
a job comes to. The product has none of them: docs/trust.md says what each of them gives and costs.
"""

import itertools
from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from benchmarks.ours.trust.training import Rows, stacked_models, stacked_outputs
from coordinator.shell.aggregation.layer_groups import LayerGroups
from coordinator.shell.evaluator.torch_evaluator import TorchEvaluator
from hypergpu.tensors.layout import Flat, Float32s, Layout
from hypergpu.workloads.networks.task import Classification

CLIP_BY_LAYER = "clip by layer"
CLIP_AND_NOISE = "clip and noise"
SIGN_VOTES = "sign votes"
LARGEST_CLUSTER = "largest cluster"
OTHERS_SAMPLES = "others' samples"
QUIET_UNITS = "prune quiet units"
STEEP_UNITS = "prune steep units"

_NOISE = 0.1
"""Length of the noise over that of the aggregate."""
_AGREEMENT = 0.5
"""Least part of all weight that has to agree in a coordinate's sign, beyond a tie."""
_GAP_MOST = 1.5
"""Standard deviations below the others beyond which a node has no vote."""
_STEEP = 2.0
"""Standard deviations above the mean of its layer beyond which a unit is pruned."""
_LOSS_MOST = 1.02
"""Pruning of quiet units goes on until the held-out loss has grown by so much."""

Weights = npt.NDArray[np.float64]


class RoundUpdates(NamedTuple):
    """Updates of a round as the product's rule left them."""

    rows: Rows
    weights: Weights
    """``float64[updates]``, of sum 1: votes times clips of the product."""
    groups: LayerGroups
    gains: Weights
    """What each update takes off the loss of samples of other nodes' shards, averaged over its
    rounds.
    """
    draws: np.random.Generator


def clip_rows_by_layer(updates: RoundUpdates) -> Float32s:
    """Clip each group of layers at the median length of that group (Sun et al., 2019,
    arXiv 1911.07963, by layer).
    """
    rows = updates.rows.copy()
    groups = np.repeat(
        [run.group for run in updates.groups.runs],
        [run.values_count for run in updates.groups.runs],
    )
    for group in range(updates.groups.groups_count):
        part = rows[:, groups == group]
        rows[:, groups == group] = _clip(part)
    return _mean(rows, updates.weights)


def clip_and_add_noise(updates: RoundUpdates) -> Float32s:
    """Clip at the median length, and add noise (the same source)."""
    return _noisy(_mean(_clip(updates.rows), updates.weights), updates.draws)


def turn_disputed_signs(updates: RoundUpdates) -> Float32s:
    """Go the other way where few agree on a coordinate's sign (Ozdayi et al., 2021,
    arXiv 2007.03767).
    """
    agreement = np.abs(updates.weights @ np.sign(updates.rows))
    mean = _mean(updates.rows, updates.weights)
    return np.where(agreement >= _AGREEMENT, mean, -mean).astype(np.float32)


def keep_largest_cluster(updates: RoundUpdates) -> Float32s:
    """Keep the cluster of more than half by angles, clip, add noise (FLAME: Nguyen et al., 2022,
    arXiv 2101.02281).
    """
    from sklearn.cluster import HDBSCAN  # Of the environment of peers alone.

    units = updates.rows / np.maximum(np.linalg.norm(updates.rows, axis=1, keepdims=True), 1e-12)
    distances = np.maximum(0, 1 - units.astype(np.float64) @ units.T)
    clusters = HDBSCAN(
        min_cluster_size=len(units) // 2 + 1,
        min_samples=1,
        allow_single_cluster=True,
        metric="precomputed",
        copy=True,
    ).fit_predict(distances)
    weights = updates.weights * (clusters == 0) if (clusters == 0).any() else updates.weights
    return _noisy(_mean(_clip(updates.rows), weights), updates.draws)


def drop_by_others_samples(updates: RoundUpdates) -> Float32s:
    """Drop who gains less than the others on samples of other nodes' shards, over rounds."""
    spread = updates.gains.std()
    is_low = updates.gains < updates.gains.mean() - _GAP_MOST * spread
    weights = np.where(is_low, 0, updates.weights)
    return _mean(updates.rows, weights if weights.sum() else updates.weights)


ROUND_DEFENCES: Mapping[str, Callable[[RoundUpdates], Float32s]] = {
    CLIP_BY_LAYER: clip_rows_by_layer,
    CLIP_AND_NOISE: clip_and_add_noise,
    SIGN_VOTES: turn_disputed_signs,
    LARGEST_CLUSTER: keep_largest_cluster,
    OTHERS_SAMPLES: drop_by_others_samples,
}


def prune_quiet_units(workload: Classification, model: Flat, held_out: TorchEvaluator) -> Flat:
    """Prune units of the last hidden layer, those that held-out samples stir least first, while the
    loss of these grows little (fine-pruning without the tuning: Liu et al., 2018,
    arXiv 1805.12185).
    """
    layout = held_out.layout
    module = workload.model()
    if not isinstance(module, nn.Sequential):
        raise TypeError("only sequential modules are pruned")
    test = held_out.dataset.test
    inputs, _ = test.batch(np.arange(len(test.labels)))
    tensors = stacked_models(layout, model.parameters[None])
    with torch.inference_mode():
        rows = workload.prepare(torch.from_numpy(inputs))[None]
        activations = stacked_outputs(module[:-1], tensors, rows)[0].abs().mean(dim=0)
    *_, output = _matrices(layout)
    limit = held_out.evaluate(model).loss * _LOSS_MOST
    best = model
    for unit in activations.argsort().tolist():
        pruned_model = _copy(best)
        _matrix(layout, pruned_model, output)[:, unit] = 0
        if held_out.evaluate(pruned_model).loss <= limit:
            best = pruned_model
    return best


def prune_steep_units(_workload: Classification, model: Flat, held_out: TorchEvaluator) -> Flat:
    """Prune hidden units whose weights are far longer than those of their layer (Zheng et al.,
    2022, arXiv 2208.03111).
    """
    layout = held_out.layout
    pruned_model = _copy(model)
    matrices = _matrices(layout)
    for inputs, outputs in itertools.pairwise(matrices):
        lengths = np.linalg.norm(_matrix(layout, pruned_model, inputs), axis=1)
        is_steep = lengths > lengths.mean() + _STEEP * lengths.std()
        _matrix(layout, pruned_model, outputs)[:, is_steep] = 0
    return pruned_model


END_DEFENCES: Mapping[str, Callable[[Classification, Flat, TorchEvaluator], Flat]] = {
    QUIET_UNITS: prune_quiet_units,
    STEEP_UNITS: prune_steep_units,
}
DEFENCES = (*ROUND_DEFENCES, *END_DEFENCES)


def _matrices(layout: Layout) -> list[int]:
    return [at for at, each in enumerate(layout.tensors) if len(each.shape) > 1]


def _matrix(layout: Layout, model: Flat, at: int) -> Rows:
    """A view of one matrix, ``[outputs, inputs]``."""
    tensor, start = layout.tensors[at], layout.offsets[at]
    return model.parameters[start : start + tensor.count].reshape(tensor.shape)


def _copy(model: Flat) -> Flat:
    return Flat(model.parameters.copy(), model.statistics, model.integers)


def _clip(rows: Rows) -> Rows:
    lengths = np.linalg.norm(rows, axis=1, keepdims=True)
    clipped_rows: Rows = rows * np.minimum(1, np.median(lengths) / np.maximum(lengths, 1e-12))
    return clipped_rows


def _mean(rows: Rows, weights: Weights) -> Float32s:
    total = weights.sum()
    mean: Float32s = ((weights / total if total else weights) @ rows).astype(np.float32)
    return mean


def _noisy(vector: Float32s, draws: np.random.Generator) -> Float32s:
    noise = draws.standard_normal(len(vector)).astype(np.float32)
    length = _NOISE * np.linalg.norm(vector) / max(1e-12, float(np.linalg.norm(noise)))
    return (vector + noise * length).astype(np.float32)

"""How much each update counts in a fold, before trust: by samples, or by inner steps."""

from collections.abc import Mapping
from typing import NamedTuple

from coordinator.core.training.job.state import AcceptedUpdate
from hypergpu.ids import NodeId

_CLAMP = 2.0
"""Steps count as between half and twice the mean: a handful of Adam's first steps, scaled up as
FedNova would, made jobs diverge.
"""
_SCALE_MOST = 1.25
_WEIGHT_ONE = 1_000_000


class Weights(NamedTuple):
    """The outer step's pseudo-gradient is ``scale * weighted mean``."""

    weights: dict[NodeId, int]
    scale: float


def update_weights(works: Mapping[NodeId, AcceptedUpdate], sharding: str) -> Weights:
    """Weigh updates by samples, or by inner steps where labels are skewed.

    Where any node may train on any sample an update counts by its samples, whatever its batches.
    Where labels are skewed it counts by its steps, and is first divided by them, so that the model
    does not drift to where most steps were taken; the mean is scaled back (FedNova,
    arXiv:2007.07481), within limits.

    Args:
        works: For each update that is folded, with at least one sample and one step.
        sharding: ``iid`` or ``dirichlet``, as the job says.

    Returns:
        Weights of at least 1, and a factor in [1, 1.25] for the weighted mean.
    """
    if not works or sharding == "iid":
        return Weights({node: int(work.samples) for node, work in works.items()}, 1.0)
    all_steps = sum(work.inner_steps for work in works.values())
    mean_steps = all_steps / len(works)
    steps = {
        node: min(_CLAMP * mean_steps, max(mean_steps / _CLAMP, work.inner_steps))
        for node, work in works.items()
    }
    # D = (sum p a) * sum p Delta / a = (sum p a) (sum p / a) * mean of Delta weighted with p / a.
    shares = {node: work.inner_steps / all_steps for node, work in works.items()}
    effective = sum(shares[node] * steps[node] for node in shares)
    scale = effective * sum(shares[node] / steps[node] for node in shares)
    weights = {
        node: max(1, round(_WEIGHT_ONE * shares[node] * mean_steps / steps[node])) for node in works
    }
    return Weights(weights, min(_SCALE_MOST, max(1.0, scale)))

"""The inner optimizer and the learning rate's course, as a task states them."""

import math
from collections.abc import Iterable, Sequence

import msgspec

OPTIMIZERS = ("adamw", "sgd", "muon")
FIRST_OPTIMIZERS = frozenset({"adamw", "sgd"})
"""Optimizers of a node that names none: it is of a version that had no others."""
MUON_MOMENTUM = 0.95
MUON_RATIO = 1.0
NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
"""Coefficients of Muon's iteration (Jordan 2024), as torch.optim.Muon has them."""
NEWTON_SCHULZ_STEPS = 5
NEWTON_SCHULZ_EPSILON = 1e-7
"""Least norm that an update is divided by before the iteration."""
_MATCHED_RMS = 0.2
"""Root mean square of AdamW's usual update (Liu et al. 2025, arXiv:2502.16982)."""
DECAY_SCOPES = ("all", "matrices")
SCHEDULES = ("constant", "cosine", "linear")


class OptimizerRule(msgspec.Struct, frozen=True, kw_only=True):
    """What an inner step does with its gradient."""

    name: str = "adamw"
    """``adamw`` (Loshchilov and Hutter 2019, arXiv:1711.05101), ``sgd``, or ``muon`` (Jordan 2024)
    for hidden weights, beside AdamW for all other parameters.
    """
    weight_decay: float = 0.0
    """AdamW shrinks the weights by it; SGD adds it times the weights to the gradient."""
    decay_scope: str = "all"
    """``all``, or ``matrices``: tensors of two axes and more, so no biases and no norms."""
    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-8
    """AdamW's, in (0, 1]; with ``sgd`` nobody looks at them."""
    momentum: float = 0.0
    """SGD's or Muon's, in [0, 1)."""
    clip_norm: float = 0.0
    """A longer gradient is scaled down to this length; 0: none is."""
    micro_batch: int = 0
    """Most samples whose activations are in memory at once: a larger batch is taken in several
    passes whose gradients add up; 0: in one.
    """
    checkpoints_activations: bool = False
    """Whether activations are computed again in the backward pass, rather than kept."""
    muon_ratio: float | msgspec.UnsetType = msgspec.UNSET
    """Learning rate of hidden weights over that of the others, before `muon_scale`; only with
    ``muon``. Unset, it is left out of a task's bytes, as by versions that had no Muon.
    """

    @property
    def hidden_ratio(self) -> float:
        """``muon_ratio``, as stated or usual."""
        return MUON_RATIO if self.muon_ratio is msgspec.UNSET else self.muon_ratio


def matrix_shape(shape: Sequence[int]) -> tuple[int, int]:
    """Rows and columns of a weight as Muon sees it: all axes but the first are columns."""
    return shape[0], math.prod(shape[1:])


def muon_scale(shape: Sequence[int]) -> float:
    """Factor by which an orthogonal update of this shape is as large as AdamW's."""
    return _MATCHED_RMS * math.sqrt(max(matrix_shape(shape)))


def before_last(layers: Iterable[str | None]) -> frozenset[str]:
    """Names of the weights of all layers before the last, which are a model's hidden ones.

    Args:
        layers: Weights of the layers, in the model's order; None: an embedding, a frozen layer, or
            one whose weight came before.
    """
    return frozenset(name for name in list(layers)[:-1] if name is not None)


def schedule_share(schedule: str, progress: float) -> float:
    """Return the share of the peak learning rate at ``progress``, the share of the samples done.

    Args:
        schedule: One of `SCHEDULES`; ``cosine`` and ``linear`` end at 0.
        progress: At least 0; beyond 1 it stays at the end.
    """
    if schedule == "cosine":
        return 0.5 * (1.0 + math.cos(math.pi * min(1.0, progress)))
    if schedule == "linear":
        return 1.0 - min(1.0, progress)
    return 1.0


def pass_sizes(batch_size: int, micro_batch: int, smallest: int = 1) -> list[int]:
    """Return how many samples each pass over a batch takes, the larger passes first.

    Args:
        batch_size: Samples of all passes.
        micro_batch: Most samples of a pass; 0: any number.
        smallest: Least samples of a pass, where the batch has as many; goes before ``micro_batch``.
    """
    if not micro_batch or micro_batch >= batch_size:
        return [batch_size]
    passes = min(-(-batch_size // micro_batch), max(1, batch_size // smallest))
    least, larger = divmod(batch_size, passes)
    return [least + 1] * larger + [least] * (passes - larger)

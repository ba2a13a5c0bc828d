"""The inner optimizer and the learning rate's course, as a task states them."""

import math

import msgspec

OPTIMIZERS = ("adamw", "sgd")
DECAY_SCOPES = ("all", "matrices")
SCHEDULES = ("constant", "cosine", "linear")


class OptimizerRule(msgspec.Struct, frozen=True, kw_only=True):
    """What an inner step does with its gradient."""

    name: str = "adamw"
    """``adamw`` (Loshchilov and Hutter 2019, arXiv:1711.05101) or ``sgd``."""
    weight_decay: float = 0.0
    """AdamW shrinks the weights by it; SGD adds it times the weights to the gradient."""
    decay_scope: str = "all"
    """``all``, or ``matrices``: tensors of two axes and more, so no biases and no norms."""
    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-8
    """AdamW's, in (0, 1]; with ``sgd`` nobody looks at them."""
    momentum: float = 0.0
    """SGD's, in [0, 1)."""
    clip_norm: float = 0.0
    """A longer gradient is scaled down to this length; 0: none is."""
    micro_batch: int = 0
    """Most samples whose activations are in memory at once: a larger batch is taken in several
    passes whose gradients add up; 0: in one.
    """
    checkpoints_activations: bool = False
    """Whether activations are computed again in the backward pass, rather than kept."""


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

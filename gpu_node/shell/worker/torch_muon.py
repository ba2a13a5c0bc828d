"""Muon's step (Jordan 2024, https://kellerjordan.github.io/posts/muon) in float32.

It is that of torch.optim.Muon but for the numbers' format: torch's iterates in bfloat16, in which
two kinds of processors end far apart, and takes weights of two axes only. The momentum of all
weights of one shape is orthogonalised at once.
"""

from collections.abc import Mapping

import torch

from hypergpu.optimizer import (
    NEWTON_SCHULZ,
    NEWTON_SCHULZ_EPSILON,
    NEWTON_SCHULZ_STEPS,
    matrix_shape,
    muon_scale,
)


def take_muon_step(
    weights: Mapping[str, torch.nn.Parameter],
    averages: Mapping[str, torch.Tensor],
    *,
    learning_rate: float,
    momentum: float,
    decay: float,
) -> None:
    """Move weights by the gradients that they hold.

    Args:
        weights: Parameters of two axes or more, by name.
        averages: Running mean of each weight's gradients; changed in place.
        learning_rate: Of the hidden weights, before the factor of their shape.
        momentum: Part of the mean that stays.
        decay: Weight decay; it shrinks weights by the learning rate without that factor.
    """
    updates: dict[tuple[int, int], dict[str, torch.Tensor]] = {}
    for name, weight in weights.items():
        if weight.grad is None:
            continue
        gradient, average = weight.grad.float(), averages[name]
        average.lerp_(gradient, 1 - momentum)
        shape = matrix_shape(weight.shape)
        # Nesterov's: the gradient counts once more than in the mean.
        updates.setdefault(shape, {})[name] = gradient.lerp(average, momentum).reshape(shape)
    for shape, group in updates.items():
        directions = orthogonal(torch.stack(list(group.values())))
        for name, direction in zip(group, directions, strict=True):
            weight = weights[name]
            weight.mul_(1 - learning_rate * decay)
            step = direction.reshape(weight.shape).to(weight.dtype)
            weight.add_(step, alpha=-learning_rate * muon_scale(shape))


def orthogonal(matrices: torch.Tensor) -> torch.Tensor:
    """Bring all singular values of each matrix near 1 by Newton-Schulz iterations.

    Args:
        matrices: ``float32[n, rows, columns]``.
    """
    a, b, c = NEWTON_SCHULZ
    is_tall = matrices.shape[1] > matrices.shape[2]
    x = matrices.mT if is_tall else matrices  # [n, k, m] with k <= m
    norms = torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True)
    x = x / norms.clamp(min=NEWTON_SCHULZ_EPSILON)
    for _ in range(NEWTON_SCHULZ_STEPS):
        gram = torch.bmm(x, x.mT)  # [n, k, k]
        polynomial = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.baddbmm(x, polynomial, x, beta=a)
    return x.mT if is_tall else x

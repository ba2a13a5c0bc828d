"""AdamW, as in Loshchilov and Hutter 2019 (arXiv:1711.05101), SGD and Muon on one flat vector."""

from collections.abc import Set

import numpy as np
from numpy.typing import NDArray

from gpu_node.shell.worker.trainer import OptimizerState, ShardError
from hypergpu.optimizer import (
    NEWTON_SCHULZ,
    NEWTON_SCHULZ_EPSILON,
    NEWTON_SCHULZ_STEPS,
    OPTIMIZERS,
    OptimizerRule,
    matrix_shape,
    muon_scale,
)
from hypergpu.tensors.layout import Flat, Float32s, Layout, unpack


def require_known(rule: OptimizerRule) -> None:
    """Require an optimizer that this node has.

    Raises:
        ShardError: It has not.
    """
    if rule.name not in OPTIMIZERS:
        raise ShardError(f"there is no optimizer {rule.name!r} here. Fix: upgrade this node")


_ALL = slice(None)


class FlatOptimizer:
    """The optimizer of a vector, with what it keeps from step to step.

    Args:
        layout: Tensors in the vector.
        hidden_weights: Names of those that Muon steps.
    """

    def __init__(self, layout: Layout, hidden_weights: Set[str] = frozenset()) -> None:
        count = layout.parameters_count
        self._first = np.zeros(count, np.float32)
        self._square = np.zeros(count, np.float32)
        self._steps = 0
        self._rule = OptimizerRule()
        self._layout = layout
        self._decayed: Float32s | None = None
        """1 where a value decays, else 0; None: all do."""
        self._hidden_weights = hidden_weights

    def begin(self, rule: OptimizerRule, kept: OptimizerState | None) -> None:
        """Take over a rule and a state that `state` gave; None: begin anew.

        Raises:
            ShardError: There is no such optimizer here.
        """
        require_known(rule)
        self._rule = rule
        self._decayed = _matrices(self._layout) if rule.decay_scope == "matrices" else None
        self._first[:] = 0 if kept is None else kept["mean"]
        self._square[:] = 0 if kept is None else kept["square"]
        self._steps = 0 if kept is None else int(kept["steps"][0])

    def state(self) -> dict[str, NDArray[np.float32]]:
        """What `begin` takes."""
        steps = np.array([self._steps], np.float32)  # exact up to 16 million
        return {"mean": self._first, "square": self._square, "steps": steps}

    def step(self, parameters: Float32s, gradient: Float32s, learning_rate: float) -> None:
        """Move ``parameters``; ``gradient`` may be changed."""
        if self._rule.clip_norm:
            length = float(np.sqrt(np.sum(np.square(gradient, dtype=np.float64))))
            gradient *= np.float32(min(1.0, self._rule.clip_norm / (length + 1e-6)))
        self._steps += 1
        if self._rule.name == "sgd":
            self._take_sgd_step(parameters, gradient, learning_rate)
        elif self._rule.name == "muon":
            self._take_muon_step(parameters, gradient, learning_rate)
        else:
            self._take_adamw_step(parameters, gradient, learning_rate)

    def _take_sgd_step(self, parameters: Float32s, gradient: Float32s, rate: float) -> None:
        if self._rule.weight_decay:
            decay = np.float32(self._rule.weight_decay) * parameters
            gradient += decay if self._decayed is None else decay * self._decayed
        self._first *= np.float32(self._rule.momentum)
        self._first += gradient
        parameters -= np.float32(rate) * self._first

    def _take_muon_step(self, parameters: Float32s, gradient: Float32s, rate: float) -> None:
        """Step each tensor by its own rule: hidden weights by Muon, the others by AdamW."""
        momentum, hidden_rate = np.float32(self._rule.momentum), rate * self._rule.hidden_ratio
        for tensor, start in zip(self._layout.tensors, self._layout.offsets, strict=True):
            place = slice(start, start + tensor.count)
            if tensor.name not in self._hidden_weights:
                self._take_adamw_step(parameters, gradient, rate, place)
                continue
            average = self._first[place]
            average += (1 - momentum) * (gradient[place] - average)
            # Nesterov's: the gradient counts once more than in the mean.
            update = gradient[place] + momentum * (average - gradient[place])
            direction = _orthogonal(update.reshape(matrix_shape(tensor.shape))).reshape(-1)
            parameters[place] *= np.float32(1 - hidden_rate * self._rule.weight_decay)
            parameters[place] -= np.float32(hidden_rate * muon_scale(tensor.shape)) * direction

    def _take_adamw_step(
        self, parameters: Float32s, gradient: Float32s, rate: float, place: slice = _ALL
    ) -> None:
        rule, steps = self._rule, self._steps
        parameters, gradient = parameters[place], gradient[place]
        first, square = self._first[place], self._square[place]
        first += np.float32(1 - rule.beta1) * (gradient - first)
        square += np.float32(1 - rule.beta2) * (gradient * gradient - square)
        mean = first / np.float32(1 - rule.beta1**steps)
        root = np.sqrt(square / np.float32(1 - rule.beta2**steps))
        if self._decayed is None:
            parameters *= np.float32(1 - rate * rule.weight_decay)
        else:
            parameters *= 1 - np.float32(rate * rule.weight_decay) * self._decayed[place]
        parameters -= np.float32(rate) * mean / (root + np.float32(rule.epsilon))


def _orthogonal(matrix: NDArray[np.float32]) -> NDArray[np.float32]:
    """Bring all singular values of a matrix near 1 by Newton-Schulz iterations.

    Products are einsum's plain loops, and not BLAS, whose threads may add in another order.
    """
    a, b, c = map(np.float32, NEWTON_SCHULZ)
    is_tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.T if is_tall else matrix
    x = x / max(np.linalg.norm(x), np.float32(NEWTON_SCHULZ_EPSILON))
    for _ in range(NEWTON_SCHULZ_STEPS):
        gram = np.einsum("im,jm->ij", x, x)
        polynomial = b * gram + c * np.einsum("ij,jk->ik", gram, gram)
        x = a * x + np.einsum("ij,jm->im", polynomial, x)
    return x.T if is_tall else x


def _matrices(layout: Layout) -> Float32s:
    """1 where a value is of a tensor of two axes and more, else 0."""
    flat = Flat.empty(layout)
    for tensor in unpack(layout, flat).values():
        tensor[...] = tensor.ndim >= 2
    return flat.parameters

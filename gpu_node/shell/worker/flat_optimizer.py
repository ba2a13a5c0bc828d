"""AdamW, as in Loshchilov and Hutter 2019 (arXiv:1711.05101), and SGD on one flat vector."""

import numpy as np
from numpy.typing import NDArray

from gpu_node.shell.worker.trainer import OptimizerState, ShardError
from hypergpu.optimizer import OPTIMIZERS, OptimizerRule
from hypergpu.tensors.layout import Flat, Float32s, Layout, unpack


def require_known(rule: OptimizerRule) -> None:
    """Require an optimizer that this node has.

    Raises:
        ShardError: It has not.
    """
    if rule.name not in OPTIMIZERS:
        raise ShardError(f"there is no optimizer {rule.name!r} here. Fix: upgrade this node")


class FlatOptimizer:
    """The optimizer of a vector, with what it keeps from step to step."""

    def __init__(self, layout: Layout) -> None:
        count = layout.parameters_count
        self._first = np.zeros(count, np.float32)
        self._square = np.zeros(count, np.float32)
        self._steps = 0
        self._rule = OptimizerRule()
        self._layout = layout
        self._decayed: Float32s | None = None
        """1 where a value decays, else 0; None: all do."""

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
        else:
            self._take_adamw_step(parameters, gradient, learning_rate)

    def _take_sgd_step(self, parameters: Float32s, gradient: Float32s, rate: float) -> None:
        if self._rule.weight_decay:
            decay = np.float32(self._rule.weight_decay) * parameters
            gradient += decay if self._decayed is None else decay * self._decayed
        self._first *= np.float32(self._rule.momentum)
        self._first += gradient
        parameters -= np.float32(rate) * self._first

    def _take_adamw_step(self, parameters: Float32s, gradient: Float32s, rate: float) -> None:
        rule, steps = self._rule, self._steps
        self._first += np.float32(1 - rule.beta1) * (gradient - self._first)
        self._square += np.float32(1 - rule.beta2) * (gradient * gradient - self._square)
        mean = self._first / np.float32(1 - rule.beta1**steps)
        root = np.sqrt(self._square / np.float32(1 - rule.beta2**steps))
        if self._decayed is None:
            parameters *= np.float32(1 - rate * rule.weight_decay)
        else:
            parameters *= 1 - np.float32(rate * rule.weight_decay) * self._decayed
        parameters -= np.float32(rate) * mean / (root + np.float32(rule.epsilon))


def _matrices(layout: Layout) -> Float32s:
    """1 where a value is of a tensor of two axes and more, else 0."""
    flat = Flat.empty(layout)
    for tensor in unpack(layout, flat).values():
        tensor[...] = tensor.ndim >= 2
    return flat.parameters

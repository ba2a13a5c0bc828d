"""torch's AdamW and SGD and our Muon on a module, with a state that lasts from round to round.

The optimizers are torch's functions, not its classes: those import torch's compiler, which would
double the seconds that a worker takes to start.
"""

from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.utils.clip_grad import clip_grad_norm_
from torch.optim.adamw import adamw
from torch.optim.sgd import sgd

from gpu_node.shell.worker.flat_optimizer import require_known
from gpu_node.shell.worker.torch_muon import take_muon_step
from gpu_node.shell.worker.trainer import OptimizerState
from hypergpu.optimizer import OptimizerRule
from hypergpu.workloads.networks.hidden_weights import hidden_weights

_MOMENTS = ("exp_avg", "exp_avg_sq", "step")
_MOMENTUM = "momentum"


def _first_moments(parameter: torch.Tensor) -> dict[str, torch.Tensor]:
    zeros = (torch.zeros_like(parameter), torch.zeros_like(parameter), torch.zeros(()))
    return dict(zip(_MOMENTS, zeros, strict=True))


class TorchOptimizer:
    """The optimizer of a module's parameters."""

    def __init__(self, model: torch.nn.Module, device: torch.device) -> None:
        self._model = model
        self._device = device
        self._rule = OptimizerRule()
        self._moments: dict[str, dict[str, torch.Tensor]] = {}
        self._hidden_weights = hidden_weights(model)

    def begin(self, rule: OptimizerRule, kept: OptimizerState | None) -> None:
        """Take over a rule and a state that `state` gave; None: begin anew.

        Raises:
            ShardError: There is no such optimizer here.
        """
        require_known(rule)
        self._rule = rule
        self._moments = {}
        for name, _ in self._model.named_parameters():
            moments = self._moment_names(name)
            if kept is not None and f"{moments[0]}/{name}" in kept:
                self._moments[name] = {
                    moment: self._tensor(moment, kept[f"{moment}/{name}"]) for moment in moments
                }

    def state(self) -> dict[str, NDArray[np.float32]]:
        """What `begin` takes."""
        return {
            f"{moment}/{name}": tensor.cpu().numpy()
            for name, moments in self._moments.items()
            for moment, tensor in moments.items()
        }

    @torch.no_grad()
    def step(self, learning_rate: float) -> None:
        """Move the parameters by the gradients that they hold."""
        state = {
            name: parameter
            for name, parameter in self._model.named_parameters()
            if parameter.grad is not None
        }
        if self._rule.clip_norm:
            clip_grad_norm_(state.values(), self._rule.clip_norm)
        if self._rule.name == "muon":
            hidden_parameters = {
                name: state.pop(name) for name in [*state] if name in self._hidden_weights
            }
            self._take_muon_step(hidden_parameters, learning_rate)
        for decay, group in self._groups(state):
            if self._rule.name == "sgd":
                self._take_sgd_step(group, learning_rate, decay)
            else:
                self._take_adamw_step(group, learning_rate, decay)

    def _moment_names(self, name: str) -> tuple[str, ...]:
        """Names of what a parameter's steps leave behind."""
        is_hidden = self._rule.name == "muon" and name in self._hidden_weights
        return (_MOMENTUM,) if is_hidden or self._rule.name == "sgd" else _MOMENTS

    def _groups(
        self, learnt: Mapping[str, torch.nn.Parameter]
    ) -> list[tuple[float, dict[str, torch.nn.Parameter]]]:
        """Parameters by their weight decay."""
        if self._rule.decay_scope == "all" or not self._rule.weight_decay:
            return [(self._rule.weight_decay, dict(learnt))]
        matrices = {name: each for name, each in learnt.items() if each.ndim >= 2}
        others = {name: each for name, each in learnt.items() if each.ndim < 2}
        groups = [(self._rule.weight_decay, matrices), (0.0, others)]
        return [(decay, group) for decay, group in groups if group]

    def _take_adamw_step(
        self, group: dict[str, torch.nn.Parameter], learning_rate: float, decay: float
    ) -> None:
        for name, parameter in group.items():
            if name not in self._moments:
                self._moments[name] = _first_moments(parameter)
        averages, squares, steps = (
            [self._moments[name][moment] for name in group] for moment in _MOMENTS
        )
        adamw(
            list(group.values()),
            _gradients(group),
            averages,
            squares,
            [],
            steps,
            # In one pass over the parameters on a CPU: half of a small model's step was the passes.
            fused=True if self._device.type == "cpu" else None,
            amsgrad=False,
            beta1=self._rule.beta1,
            beta2=self._rule.beta2,
            lr=learning_rate,
            weight_decay=decay,
            eps=self._rule.epsilon,
            maximize=False,
        )

    def _take_muon_step(
        self, hidden: Mapping[str, torch.nn.Parameter], learning_rate: float
    ) -> None:
        for name, weight in hidden.items():
            if name not in self._moments:
                self._moments[name] = {_MOMENTUM: torch.zeros_like(weight, dtype=torch.float32)}
        take_muon_step(
            hidden,
            {name: self._moments[name][_MOMENTUM] for name in hidden},
            learning_rate=learning_rate * self._rule.hidden_ratio,
            momentum=self._rule.momentum,
            decay=self._rule.weight_decay,
        )

    def _take_sgd_step(
        self, group: dict[str, torch.nn.Parameter], learning_rate: float, decay: float
    ) -> None:
        buffers = [self._moments.get(name, {}).get(_MOMENTUM) for name in group]
        sgd(
            list(group.values()),
            _gradients(group),
            buffers,
            weight_decay=decay,
            momentum=self._rule.momentum,
            lr=learning_rate,
            dampening=0.0,
            nesterov=False,
            maximize=False,
        )
        for name, buffer in zip(group, buffers, strict=True):
            if buffer is not None:
                self._moments[name] = {_MOMENTUM: buffer}

    def _tensor(self, moment: str, values: NDArray[np.float32]) -> torch.Tensor:
        # AdamW keeps its step counts on the CPU: it reads them to correct the bias.
        return torch.tensor(values, device="cpu" if moment == "step" else self._device)


def _gradients(group: Mapping[str, torch.nn.Parameter]) -> list[torch.Tensor]:
    return [parameter.grad for parameter in group.values() if parameter.grad is not None]

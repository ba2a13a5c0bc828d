"""Gradients of one's own: functions and hooks. See `constructs`."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable


class StraightThrough(torch.autograd.Function):
    """Steps that pass gradients as they come."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return (x > 0).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0]


class Reversal(torch.autograd.Function):
    """Ganin and Lempitsky 2015, arXiv:1409.7495."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return -gradients[0]


class HalfReversal(Reversal):
    """Another backward with the forward of its base."""

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return -0.5 * gradients[0]


class Scaling(torch.autograd.Function):
    """A factor that the context keeps."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0] * ctx.factor, None


class Exponential(torch.autograd.Function):
    """Saves its result."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        result = x.exp()
        ctx.save_for_backward(result)
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (result,) = ctx.saved_tensors
        return gradients[0] * result


class Cube(torch.autograd.Function):
    """Written with setup_context."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x**3

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return gradients[0] * 2 * x**2


class Product(torch.autograd.Function):
    """A product of two tensors, with half the gradient of the second."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:
        ctx.save_for_backward(x, y)
        return x * y

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x, y = ctx.saved_tensors
        second = 0.5 * gradients[0] * x if ctx.needs_input_grad[1] else None
        return gradients[0] * y, second


class Parts(torch.autograd.Function):
    """Two results."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(x)
        return x.clamp(min=0), x.clamp(max=0)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return torch.where(x > 0, gradients[0], 0.1 * gradients[1])


class ClippedGradient(torch.autograd.Function):
    """Changes the gradient in place, by the values of the input."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.round()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        gradient = gradients[0].clone()
        gradient[x.abs() > 1] = 0
        return gradient.clamp_(-0.01, 0.01)


class Guarded(torch.autograd.Function):
    """Contexts of gradients within forward and backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        with torch.no_grad():
            scale = x.abs().amax()
        with torch.enable_grad():
            shifted_values = x + 1
        ctx.save_for_backward(scale)
        return shifted_values.detach() / scale

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        with torch.no_grad():
            return gradients[0] / ctx.saved_tensors[0]


def doubled_by_hook(h: Tensor) -> Tensor:
    """A hook that every trained tensor gets."""
    if h.requires_grad:
        h.register_hook(lambda gradient: 2 * gradient)
    return h


def hooked_before_uses(h: Tensor) -> Tensor:
    """A use before the hook counts, too."""
    early = h.sin()
    if h.requires_grad:
        h.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))
    return early + h


def two_hooks(h: Tensor) -> Tensor:
    """They run in the order in which they were registered."""
    if h.requires_grad:
        h.register_hook(lambda gradient: gradient + 0.1)
        h.register_hook(lambda gradient: gradient * 3)
    return h.tanh()


def clamped_by_hook(h: Tensor) -> Tensor:
    """A bound that depends on the gradient alone."""
    if h.requires_grad:
        h.register_hook(lambda gradient: gradient / gradient.norm().clamp(min=0.05))
    return h


def observing_hook(h: Tensor) -> Tensor:
    """A hook that returns nothing."""
    if h.requires_grad:
        h.register_hook(lambda gradient: None)
    return h.tanh()


def parameter_hook() -> nn.Module:
    """A parameter with a mask on its gradient."""
    model = nn.Sequential(nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, 3))
    mask = (torch.arange(12) % 2).float()[:, None]
    model[0].get_parameter("weight").register_hook(lambda gradient: gradient * mask)
    return model


def module_hook() -> nn.Module:
    """A module that scales the gradient of its input."""
    model = nn.Sequential(nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, 3))

    def hook(module: nn.Module, inputs: Any, outputs: Any) -> tuple[Tensor]:
        return (inputs[0] * 0.5,)

    model[1].register_full_backward_hook(hook)
    return model


def module_pre_hook() -> nn.Module:
    """A module that scales the gradient of its output."""
    model = nn.Sequential(nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, 3))

    def hook(module: nn.Module, outputs: Any) -> tuple[Tensor]:
        return (outputs[0] * 0.5,)

    model[1].register_full_backward_pre_hook(hook)
    return model


class GraphNodeHook(nn.Module):
    """A hook that no trace sees."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 12), nn.Linear(12, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        if h.grad_fn is not None:
            h.grad_fn.register_prehook(lambda gradients: tuple(3 * each for each in gradients))
        logits: Tensor = self.b(h)
        return logits


class _ByNumber(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0] if float(gradients[0].sum()) > 0 else -gradients[0]


class NumberBackward(nn.Module):
    """A backward pass that decides by the value of a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 12), nn.Linear(12, 3)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.b(_ByNumber.apply(self.a(x)))
        return logits

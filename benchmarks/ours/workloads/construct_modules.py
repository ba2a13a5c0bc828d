"""The modules, functions and losses of `constructs`."""

import copy
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from torch.nn.utils import parametrize
from torch.utils.checkpoint import checkpoint

Batch = Mapping[str, Tensor]


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
    """Of two tensors, with half the gradient of the second."""

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
            shifted = x + 1
        ctx.save_for_backward(scale)
        return shifted.detach() / scale

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


def watched(h: Tensor) -> Tensor:
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
    model[1].register_full_backward_hook(lambda module, inputs, outputs: (inputs[0] * 0.5,))
    return model


def module_pre_hook() -> nn.Module:
    """A module that scales the gradient of its output."""
    model = nn.Sequential(nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, 3))
    model[1].register_full_backward_pre_hook(lambda module, outputs: (outputs[0] * 0.5,))
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


class Counting(nn.Module):
    """A counter that the loss depends on."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 3)
        self.count: Tensor
        self.register_buffer("count", torch.zeros((), dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            if self.count.dtype == torch.bool:
                self.count.fill_(True)
            else:
                self.count.add_(1)
        logits: Tensor = self.layer(x) / (1 + self.count.float())
        return logits


class AssignedBuffer(nn.Module):
    """A mean that is assigned, not changed in place."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 3)
        self.register_buffer("scale", torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.scale = 0.9 * self.scale + 0.1 * x.abs().mean().detach()
        logits: Tensor = self.layer(x) / self.scale
        return logits


class DoubleStatistics(nn.Module):
    """A normaliser as reinforcement learning has them."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 3)
        self.mean: Tensor
        self.count: Tensor
        self.register_buffer("mean", torch.zeros(8, dtype=torch.float64))
        self.register_buffer("count", torch.zeros((), dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.count.add_(1.0)
            self.mean.add_((x.detach().double().mean(0) - self.mean) / self.count)
        logits: Tensor = self.layer(x - self.mean.float())
        return logits


class PassingBuffer(nn.Module):
    """A mean that is no part of the state."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 3)
        self.mean: Tensor
        self.register_buffer("mean", torch.zeros(8), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.mean.lerp_(x.mean(0).detach(), 0.1)
        logits: Tensor = self.layer(x - self.mean)
        return logits


class ComplexTable(nn.Module):
    """A table of complex numbers, as rotary positions have."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 3)
        self.table: Tensor
        self.register_buffer("table", torch.polar(torch.ones(4), torch.arange(4.0)))

    def forward(self, x: Tensor) -> Tensor:
        turned = torch.view_as_complex(x.reshape(-1, 4, 2)) * self.table
        logits: Tensor = self.layer(torch.view_as_real(turned).flatten(1))
        return logits


class MomentumCopy(nn.Module):
    """He et al. 2020, arXiv:1911.05722."""

    def __init__(self) -> None:
        super().__init__()
        self.online, self.head = nn.Linear(8, 12), nn.Linear(24, 3)
        self.target = copy.deepcopy(self.online).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            if self.training:
                pairs = zip(self.target.parameters(), self.online.parameters(), strict=True)
                for slow, quick in pairs:
                    slow.mul_(0.9).add_(quick, alpha=0.1)
            key = self.target(x)
        logits: Tensor = self.head(torch.cat([self.online(x), key], 1))
        return logits


class BoundedWeights(nn.Module):
    """As a critic of Wasserstein's distance bounds its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                self.layer.weight.clamp_(-0.2, 0.2)
        logits: Tensor = self.layer(x)
        return logits


class StepNumber(nn.Module):
    """A warm-up by a number of Python."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.step = nn.Linear(8, 3), 0

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.step += 1
        logits: Tensor = self.layer(x) * min(1.0, 0.1 * self.step)
        return logits


class HiddenState(nn.Module):
    """What one forward pass leaves to the next, in an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 3)
        self.hidden: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.layer(x)
        if self.hidden is not None:
            logits = logits + self.hidden
        self.hidden = logits.detach().mean(0)
        return logits


class ChangedTable(nn.Module):
    """A tensor that is no buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.seen = nn.Linear(8, 3), torch.zeros(8)

    def forward(self, x: Tensor) -> Tensor:
        self.seen += x.detach().mean(0)
        logits: Tensor = self.layer(x - self.seen)
        return logits


class TiedTokens(nn.Module):
    """One table for input and output."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.table, self.out = nn.Embedding(20, 8), nn.Linear(8, 20, bias=False)
        if how == "object":
            self.out.weight = self.table.weight
        elif how == "memory":
            self.out.weight = nn.Parameter(self.table.weight.data)
        self.how = how

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.table(x).mean(1)
        if self.how == "transposed":
            return hidden @ self.table.weight.t() + self.out(hidden)
        logits: Tensor = self.out(hidden)
        return logits


class SlicedWeight(nn.Module):
    """A parameter in another's memory."""

    def __init__(self) -> None:
        super().__init__()
        self.whole, self.part = nn.Linear(8, 12), nn.Linear(8, 3, bias=False)
        self.part.weight = nn.Parameter(self.whole.weight.data[:3])

    def forward(self, x: Tensor) -> Tensor:
        return self.part(x) + self.whole(x)[:, :3]


class FrozenLayer(nn.Module):
    """A layer that stays as it is."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(8, 12).requires_grad_(False)
        self.head = nn.Linear(12, 3)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.base(x).relu())
        return logits


class ToggledLayer(nn.Module):
    """A layer that evaluation freezes."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 12), nn.Linear(12, 3)

    def forward(self, x: Tensor) -> Tensor:
        with torch.set_grad_enabled(self.training):
            hidden = self.a(x)
        logits: Tensor = self.b(hidden.relu())
        return logits


class ComplexWeights(nn.Module):
    """Complex parameters, and a result of their absolute values."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 3, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        return (x.to(torch.complex64) @ self.weight).abs()


class LateParameter(nn.Module):
    """A parameter that the forward pass makes."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        if not hasattr(self, "scale"):
            self.scale = nn.Parameter(torch.ones(3))
        logits: Tensor = self.layer(x) * self.scale
        return logits


class Convolutions(nn.Module):
    """BatchNorm and dropout between convolutions."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, 6, 3, padding="same"),
            nn.BatchNorm2d(6),
            nn.ReLU(inplace=True),
            nn.Dropout2d(0.2),
            nn.MaxPool2d(2),
            nn.Conv2d(6, 6, 3, stride=2, padding=1, padding_mode="reflect"),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(6, 3),
        )

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.layers(x)
        return logits


class OddConvolutions(nn.Module):
    """Groups, dilation and transposition."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, 6, 3, groups=3, padding=1),
            nn.PReLU(),
            nn.Conv2d(6, 4, 3, dilation=2, padding=2),
            nn.ConvTranspose2d(4, 4, 2, stride=2),
            nn.LeakyReLU(0.1, inplace=True),
            nn.AvgPool2d(4),
            nn.Flatten(),
            nn.Linear(64, 3),
        )

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.layers(x)
        return logits


class Norms(nn.Module):
    """Norms that do not see the batch, and one that keeps statistics of a sample."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, 6, 3, padding=1),
            nn.GroupNorm(3, 6),
            nn.GELU(),
            nn.InstanceNorm2d(6, affine=True, track_running_stats=True),
            nn.LocalResponseNorm(2),
            nn.Flatten(),
            nn.LayerNorm(384),
            nn.Linear(384, 3),
        )

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.layers(x)
        return logits


class SmallUNet(nn.Module):
    """Down, up, and beside."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.middle = nn.Conv2d(3, 6, 3, padding=1), nn.Conv2d(6, 6, 3, padding=1)
        self.up, self.head = nn.Conv2d(12, 4, 3, padding=1), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        high = self.down(x).relu()
        low = self.middle(F.max_pool2d(high, 2)).relu()
        low = F.interpolate(low, size=high.shape[-2:], mode="bilinear", align_corners=False)
        logits: Tensor = self.head(self.up(torch.cat([high, low], 1)).mean((2, 3)))
        return logits


class PooledIndices(nn.Module):
    """Places of the largest values."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.Conv2d(3, 4, 3), nn.Linear(4 * 9 * 2, 3)

    def forward(self, x: Tensor) -> Tensor:
        values, places = F.max_pool2d(self.layer(x), 2, return_indices=True)
        both = torch.cat([values, values * places.to(values.dtype) / 36], 1)
        logits: Tensor = self.head(both.flatten(1))
        return logits


class Patches(nn.Module):
    """Patches out of images and back."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.Linear(12, 12), nn.Linear(192, 3)

    def forward(self, x: Tensor) -> Tensor:
        patches = F.unfold(x, 2, stride=2).transpose(1, 2)
        whole = F.fold(self.layer(patches).transpose(1, 2), (8, 8), 2, stride=2)
        logits: Tensor = self.head(whole.flatten(1))
        return logits


class Warp(nn.Module):
    """A spatial transformer, Jaderberg et al. 2015, arXiv:1506.02025."""

    def __init__(self) -> None:
        super().__init__()
        self.place, self.head = nn.Linear(192, 6), nn.Linear(192, 3)

    def forward(self, x: Tensor) -> Tensor:
        grid = F.affine_grid(self.place(x.flatten(1)).view(-1, 2, 3), x.shape, align_corners=False)
        logits: Tensor = self.head(F.grid_sample(x, grid, align_corners=False).flatten(1))
        return logits


class Recurrent(nn.Module):
    """Two layers with dropout, the last valid state of each series."""

    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        both = kind is nn.GRU
        self.layers = kind(8, 6, 2, batch_first=True, dropout=0.2, bidirectional=both)
        self.head = nn.Linear(12 if both else 6, 3)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        hidden, _ = self.layers(x)
        hidden = hidden * mask[..., None]
        logits: Tensor = self.head(hidden.sum(1) / mask.sum(1, keepdim=True).clamp(min=1))
        return logits


class CellLoop(nn.Module):
    """Cells over time, from a learned start."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.LSTMCell(8, 6), nn.Linear(6, 3)
        self.start = nn.Parameter(torch.zeros(6))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        hidden = self.start.expand(x.shape[0], -1)
        cell = torch.zeros_like(hidden)
        for step in range(x.shape[1]):
            after = self.cell(x[:, step], (hidden, cell))
            keep = mask[:, step, None]
            hidden = torch.where(keep, after[0], hidden)
            cell = torch.where(keep, after[1], cell)
        logits: Tensor = self.head(hidden)
        return logits


class MaskedAttention(nn.Module):
    """nn.MultiheadAttention with padding."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, dropout=0.1, batch_first=True)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        hidden = mask.clone()
        hidden[:, 0] = True
        seen, weights = self.attention(x, x, x, key_padding_mask=~hidden)
        logits: Tensor = self.head(seen.mean(1) + weights.mean())
        return logits


class Encoder(nn.Module):
    """Layers of torch with padding, whose evaluation has kernels of its own."""

    def __init__(self, layer: Callable[[], nn.TransformerEncoderLayer]) -> None:
        super().__init__()
        self.layers, self.head = nn.TransformerEncoder(layer(), 2), nn.Linear(8, 3)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        hidden = mask.clone()
        hidden[:, 0] = True
        seen = self.layers(x, src_key_padding_mask=~hidden)
        logits: Tensor = self.head((seen * hidden[..., None]).sum(1))
        return logits


class BothHalves(nn.Module):
    """nn.Transformer with a causal mask."""

    def __init__(self) -> None:
        super().__init__()
        self.whole = nn.Transformer(8, 2, 1, 1, 16, batch_first=True)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        causal = nn.Transformer.generate_square_subsequent_mask(x.shape[1], device=x.device)
        logits: Tensor = self.head(self.whole(x, x * mask[..., None], tgt_mask=causal).mean(1))
        return logits


class LeastFloatMask(nn.Module):
    """Attention by hand, with the least float for what is hidden."""

    def __init__(self) -> None:
        super().__init__()
        self.parts, self.head = nn.Linear(8, 24), nn.Linear(8, 3)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        query, key, value = self.parts(x).chunk(3, -1)
        scores = query @ key.transpose(1, 2) / 8**0.5
        scores = scores.masked_fill(~mask[:, None, :], torch.finfo(x.dtype).min)
        logits: Tensor = self.head((scores.softmax(-1) @ value).mean(1))
        return logits


class Rotary(nn.Module):
    """Su et al. 2021, arXiv:2104.09864, by complex numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        angles = torch.outer(torch.arange(x.shape[1]).float(), torch.arange(4).float())
        turns = torch.polar(torch.ones_like(angles), angles)
        pairs = torch.view_as_complex(self.layer(x).reshape(*x.shape[:2], 4, 2))
        turned = torch.view_as_real(pairs * turns).flatten(2)
        logits: Tensor = self.head((turned * mask[..., None]).mean(1))
        return logits


class Scatter(nn.Module):
    """Messages along edges that the data name."""

    def __init__(self) -> None:
        super().__init__()
        self.message, self.head = nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        target = (x[..., 0].abs() * 7).long() % x.shape[1]
        sent = self.message(x) * mask[..., None]
        target = target[..., None].expand_as(sent)
        summed = torch.zeros_like(x).scatter_add(1, target, sent)
        most = torch.zeros_like(x).scatter_reduce(1, target, sent, "amax", include_self=False)
        logits: Tensor = self.head((summed + most).mean(1))
        return logits


class Experts(nn.Module):
    """The best two of four, by index."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(8, 4)
        self.weight = nn.Parameter(torch.randn(4, 8, 3))

    def forward(self, x: Tensor) -> Tensor:
        values, chosen = self.gate(x).topk(2)
        outputs = torch.einsum("bi,bkio->bko", x, self.weight[chosen])
        return (values.softmax(-1)[..., None] * outputs).sum(1)


class Bags(nn.Module):
    """Bags of tokens, some of them padding."""

    def __init__(self, mode: str) -> None:
        super().__init__()
        self.bags = nn.EmbeddingBag(20, 8, mode=mode, padding_idx=0)
        self.head = nn.Linear(8, 3)
        self.by_offsets = mode == "mean"

    def forward(self, x: Tensor) -> Tensor:
        if self.by_offsets:
            offsets = torch.arange(0, x.numel(), x.shape[1], device=x.device)
            pooled = self.bags(x.reshape(-1), offsets)
        else:
            pooled = self.bags(x)
        logits: Tensor = self.head(pooled)
        return logits


class Table(nn.Module):
    """An embedding with an option."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(20, 8, **options), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.table(x).mean(1))
        return logits


class FakeQuantised(nn.Module):
    """Quantisation-aware training by torch's own operator."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 12), nn.Linear(12, 3)

    def forward(self, x: Tensor) -> Tensor:
        weight = torch.fake_quantize_per_tensor_affine(self.a.weight, 0.05, 0, -128, 127)
        logits: Tensor = self.b(F.linear(x, weight, self.a.bias).relu())
        return logits


def lazy_layer() -> nn.Module:
    """A layer that a first batch made."""
    model = nn.Sequential(nn.LazyLinear(12), nn.ReLU(), nn.Linear(12, 3))
    model(torch.zeros(2, 8))
    return model


class NamedOutputs(nn.Module):
    """Outputs by name, as transformers has them."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"logits": self.layer(x), "features": x}


def named_output_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Takes one of them."""
    return F.cross_entropy(model(batch["x"])["logits"], batch["y"])


class InPlaceInputs(nn.Module):
    """Changes what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x.sub_(x.mean(0)).div_(x.std(0) + 1e-3)
        x[:, 0] = 1.0
        logits: Tensor = self.layer(x)
        return logits


class BilinearLayer(nn.Module):
    """nn.Bilinear and a low-rank product."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Bilinear(8, 8, 3)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.layer(x, x.flip(1))
        return logits


class _Symmetric(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight.triu() + weight.triu(1).transpose(-1, -2)


def symmetric(layer: nn.Module) -> None:
    """Parametrize the first columns of a layer's weight."""

    class Padded(nn.Module):
        def forward(self, weight: Tensor) -> Tensor:
            square = weight[: weight.shape[1]]
            return torch.cat([_Symmetric()(square), weight[weight.shape[1] :]])

    parametrize.register_parametrization(layer, "weight", Padded())


class Checkpointed(nn.Module):
    """A block whose activations are computed again, with dropout in it."""

    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(8, 12), nn.Linear(12, 3)
        self.block = nn.Sequential(nn.Linear(12, 12), nn.Tanh(), nn.Dropout(0.3))
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        hidden = hidden + checkpoint(self.block, hidden, use_reentrant=self.reentrant)
        logits: Tensor = self.head(hidden)
        return logits


class CheckpointedInput(nn.Module):
    """A reentrant checkpoint of what has no gradient: torch trains nothing within."""

    def __init__(self) -> None:
        super().__init__()
        self.block, self.head = nn.Linear(8, 12), nn.Linear(12, 3)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(checkpoint(self.block, x, use_reentrant=True).relu())
        return logits


def without_gradient(h: Tensor) -> Tensor:
    """A scale that has no gradient."""
    with torch.no_grad():
        scale = h.abs().amax(1, keepdim=True)
    return h / (1 + scale)


def toggled_gradient(h: Tensor) -> Tensor:
    """Contexts within contexts."""
    with torch.set_grad_enabled(False):
        a = h.sin()
        with torch.enable_grad():
            b = h.cos()
    return a + b * h


def gradient_penalty(h: Tensor) -> Tensor:
    """A loss of a gradient, Gulrajani et al. 2017, arXiv:1704.00028."""
    if not h.requires_grad:
        return h.tanh()
    (gradient,) = torch.autograd.grad(h.tanh().sum(), h, create_graph=True)
    return h.tanh() + 0.1 * gradient.square()


def penalised_loss(model: nn.Module, batch: Batch) -> Tensor:
    """The norm of a critic's gradient between samples, as for Wasserstein's distance."""
    x = batch["x"]
    share = torch.rand(x.shape[0], 1, device=x.device)
    with torch.enable_grad():
        between = (share * x + (1 - share) * x.flip(0)).detach().requires_grad_(True)
        outputs = model(between).sum()
        gradient = torch.autograd.grad(outputs, between, create_graph=True)[0]
    penalty = (gradient.norm(dim=1) - 1).square().mean()
    return F.cross_entropy(model(x), batch["y"]) + 10 * penalty


def physics_loss(model: nn.Module, batch: Batch) -> Tensor:
    """A second derivative by the inputs, Raissi et al. 2019, doi:10.1016/j.jcp.2018.10.045."""
    with torch.enable_grad():
        x = batch["x"].requires_grad_()
        u = model(x)[:, 0]
        first = torch.autograd.grad(u, x, torch.ones_like(u), create_graph=True)[0]
        ones = torch.ones_like(first)
        second = torch.autograd.grad(first, x, grad_outputs=ones, create_graph=True)[0]
    return (second.sum(1) + u.sin()).square().mean()


def assigned_by_mask(h: Tensor) -> Tensor:
    """Values at places that a mask names."""
    out = h.clone()
    out[h < 0] = 0.1
    out[:, 0] = h[:, 1] * 2
    return out


def all_dropouts(h: Tensor) -> Tensor:
    """One after the other."""
    h = F.dropout(h, 0.2)
    h = F.alpha_dropout(h, 0.1, training=True)
    return F.feature_alpha_dropout(h[..., None], 0.1, training=True).squeeze(-1)


def sampled_class(h: Tensor) -> Tensor:
    """REINFORCE's two parts."""
    chosen = torch.distributions.Categorical(logits=h)
    sample = chosen.sample()
    return h + chosen.log_prob(sample)[:, None] + chosen.entropy()[:, None]


def own_generator(h: Tensor) -> Tensor:
    """Noise of a generator of one's own."""
    generator = torch.Generator(h.device).manual_seed(3)
    noise = torch.empty_like(h).normal_(generator=generator)
    return h * torch.rand(h.shape, generator=generator) + noise


def numpy_noise(h: Tensor) -> Tensor:
    """Noise that a trace would hold as one number."""
    return h * float(np.random.random())  # noqa: NPY002 - as people write it


def determinant(h: Tensor) -> Tensor:
    """Linear algebra of a small matrix."""
    square = h.T @ h / h.shape[0] + torch.eye(12, device=h.device)
    whitened = h @ torch.linalg.inv(square) + torch.linalg.eigvalsh(square)
    return whitened + torch.logdet(square) + torch.linalg.solve(square, h.T).T


def spectrum(h: Tensor) -> Tensor:
    """A short-time Fourier transform."""
    window = torch.hann_window(4, device=h.device)
    bins = torch.stft(h, 4, 2, window=window, return_complex=True).abs()
    return h + bins.mean((1, 2))[:, None]


def weighted_loss(logits: Tensor, y: Tensor) -> Tensor:
    """Classes that count unequally."""
    return F.cross_entropy(logits, y, weight=torch.tensor([1.0, 2.0, 0.5], device=y.device))


def focal_loss(logits: Tensor, y: Tensor) -> Tensor:
    """Lin et al. 2017, arXiv:1708.02002."""
    each = F.cross_entropy(logits, y, reduction="none")
    return ((1 - (-each).exp()) ** 2 * each).mean()


def divergence(logits: Tensor, y: Tensor) -> Tensor:
    """Against a smooth target."""
    target = F.one_hot(y, 3).float() * 0.7 + 0.1
    return F.kl_div(logits.log_softmax(1), target, reduction="batchmean")


def contrastive_loss(features: Tensor, y: Tensor) -> Tensor:
    """Pairs within the batch, van den Oord et al. 2018, arXiv:1807.03748."""
    one, other = F.normalize(features[:, :3], dim=1), F.normalize(features[:, 3:], dim=1)
    scores = one @ other.T / 0.1
    return F.cross_entropy(scores, torch.arange(scores.shape[0], device=y.device))


def triplet_loss(features: Tensor, y: Tensor) -> Tensor:
    """Rolled samples as positive and negative."""
    return F.triplet_margin_loss(features, features.roll(1, 0), features.roll(2, 0), margin=0.5)


def binary_loss(logits: Tensor, y: Tensor) -> Tensor:
    """Several labels."""
    weight = torch.tensor([1.0, 3.0, 1.0], device=y.device)
    target = F.one_hot(y, 3).float()
    return F.binary_cross_entropy_with_logits(logits, target, pos_weight=weight)


def robust_loss(logits: Tensor, y: Tensor) -> Tensor:
    """Two of them."""
    target = F.one_hot(y, 3).float()
    return F.huber_loss(logits, target, delta=0.3) + F.smooth_l1_loss(logits, target, beta=0.2)


def ctc(logits: Tensor, y: Tensor) -> Tensor:
    """Five classes at four moments."""
    scores = logits.view(-1, 4, 5).log_softmax(2).transpose(0, 1)
    lengths = torch.full_like(y, 4), torch.ones_like(y)
    return F.ctc_loss(scores, y[:, None] + 1, *lengths, zero_infinity=True)


def gaussian_loss(outputs: Tensor, y: Tensor) -> Tensor:
    """Mean and variance of two numbers."""
    target = torch.stack([y, y + 1], 1).float()
    return F.gaussian_nll_loss(outputs[:, :2], target, F.softplus(outputs[:, 2:]))


class Variational(nn.Module):
    """Kingma and Welling 2014, arXiv:1312.6114."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Linear(8, 8), nn.Linear(4, 8)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mean, logarithm = self.encoder(x).chunk(2, 1)
        sample = mean + torch.randn_like(mean) * (0.5 * logarithm).exp()
        return self.decoder(sample), mean, logarithm


def variational_loss(model: nn.Module, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
    """Reconstruction and divergence."""
    rebuilt, mean, logarithm = model(batch["x"])
    error = F.mse_loss(rebuilt, batch["x"])
    distance = -0.5 * (1 + logarithm - mean.square() - logarithm.exp()).sum(1).mean()
    return error + 0.1 * distance, {"error": error, "distance": distance}


class Denoiser(nn.Module):
    """Ho et al. 2020, arXiv:2006.11239, on rows."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(9, 16), nn.SiLU(), nn.Linear(16, 8))
        self.shares: Tensor
        self.register_buffer("shares", torch.cumprod(1 - torch.linspace(1e-4, 0.2, 50), 0))

    def forward(self, x: Tensor, step: Tensor) -> Tensor:
        rebuilt: Tensor = self.layers(torch.cat([x, step[:, None] / 50], 1))
        return rebuilt


def diffusion_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Noise of a random step."""
    x = batch["x"]
    step = torch.randint(0, 50, (x.shape[0],), device=x.device)
    noise = torch.randn_like(x)
    share = model.get_buffer("shares")[step][:, None]
    noisy = share.sqrt() * x + (1 - share).sqrt() * noise
    return F.mse_loss(model(noisy, step), noise)


class Adversaries(nn.Module):
    """A generator and a critic that one loss trains."""

    def __init__(self) -> None:
        super().__init__()
        self.generator, self.critic = nn.Linear(4, 8), nn.Linear(8, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        made = self.generator(torch.randn(x.shape[0], 4, device=x.device))
        weights, bias = self.critic.weight, self.critic.bias
        fooled = F.linear(made, weights.detach(), bias.detach())
        told = self.critic(x) - self.critic(made.detach())
        return fooled, told


def adversarial_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Two losses, each of which reaches one of the two."""
    fooled, told = model(batch["x"])
    return F.softplus(-fooled).mean() + F.softplus(-told).mean()


def selected_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Only samples that a mask names."""
    chosen = batch["y"] != 2
    return F.cross_entropy(model(batch["x"])[chosen], batch["y"][chosen])


def decayed_loss(model: nn.Module, batch: Batch) -> Tensor:
    """A penalty on every parameter."""
    penalty = sum((each.square().sum() for each in model.parameters()), torch.zeros(()))
    return F.cross_entropy(model(batch["x"]), batch["y"]) + 1e-2 * penalty

"""State that a forward pass changes, and parameters that are shared. See `constructs`."""

import copy

import torch
from torch import Tensor, nn


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
        self.scale: Tensor
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
        turned_values = torch.view_as_complex(x.reshape(-1, 4, 2)) * self.table
        logits: Tensor = self.layer(torch.view_as_real(turned_values).flatten(1))
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
        hidden_state = self.table(x).mean(1)
        if self.how == "transposed":
            return hidden_state @ self.table.weight.t() + self.out(hidden_state)
        logits: Tensor = self.out(hidden_state)
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
            hidden_state = self.a(x)
        logits: Tensor = self.b(hidden_state.relu())
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

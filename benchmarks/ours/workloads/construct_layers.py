"""Layers and small networks. See `constructs`."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrize

Batch = Mapping[str, Tensor]


class PlainConvolutions(nn.Module):
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
        grid = F.affine_grid(
            self.place(x.flatten(1)).view(-1, 2, 3), [*x.shape], align_corners=False
        )
        logits: Tensor = self.head(F.grid_sample(x, grid, align_corners=False).flatten(1))
        return logits


class Recurrent(nn.Module):
    """Two layers with dropout, the last valid state of each series."""

    def __init__(self, kind: Callable[..., nn.RNNBase]) -> None:
        super().__init__()
        both = kind is nn.GRU
        self.layers = kind(8, 6, 2, batch_first=True, dropout=0.2, bidirectional=both)
        self.head = nn.Linear(12 if both else 6, 3)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        hidden_states, _ = self.layers(x)
        hidden_states = hidden_states * mask[..., None]
        logits: Tensor = self.head(hidden_states.sum(1) / mask.sum(1, keepdim=True).clamp(min=1))
        return logits


class CellLoop(nn.Module):
    """Cells over time, from a learned start."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.LSTMCell(8, 6), nn.Linear(6, 3)
        self.start = nn.Parameter(torch.zeros(6))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        hidden_state = self.start.expand(x.shape[0], -1)
        cell = torch.zeros_like(hidden_state)
        for step in range(x.shape[1]):
            after = self.cell(x[:, step], (hidden_state, cell))
            keep = mask[:, step, None]
            hidden_state = torch.where(keep, after[0], hidden_state)
            cell = torch.where(keep, after[1], cell)
        logits: Tensor = self.head(hidden_state)
        return logits


class MaskedAttention(nn.Module):
    """nn.MultiheadAttention with padding."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, dropout=0.1, batch_first=True)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        hidden_mask = mask.clone()
        hidden_mask[:, 0] = True
        attended_values, weights = self.attention(x, x, x, key_padding_mask=~hidden_mask)
        logits: Tensor = self.head(attended_values.mean(1) + weights.mean())
        return logits


class Encoder(nn.Module):
    """Layers of torch with padding, whose evaluation has kernels of its own."""

    def __init__(self, layer: Callable[[], nn.TransformerEncoderLayer]) -> None:
        super().__init__()
        self.layers, self.head = nn.TransformerEncoder(layer(), 2), nn.Linear(8, 3)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        hidden_mask = mask.clone()
        hidden_mask[:, 0] = True
        states = self.layers(x, src_key_padding_mask=~hidden_mask)
        logits: Tensor = self.head((states * hidden_mask[..., None]).sum(1))
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
        turned_values = torch.view_as_real(pairs * turns).flatten(2)
        logits: Tensor = self.head((turned_values * mask[..., None]).mean(1))
        return logits


class Scatter(nn.Module):
    """Messages along edges that the data name."""

    def __init__(self) -> None:
        super().__init__()
        self.message, self.head = nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        target = (x[..., 0].abs() * 7).long() % x.shape[1]
        messages = self.message(x) * mask[..., None]
        target = target[..., None].expand_as(messages)
        message_sums = torch.zeros_like(x).scatter_add(1, target, messages)
        most = torch.zeros_like(x).scatter_reduce(1, target, messages, "amax", include_self=False)
        logits: Tensor = self.head((message_sums + most).mean(1))
        return logits


class Experts(nn.Module):
    """The best two of four, by index."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(8, 4)
        self.weight = nn.Parameter(torch.randn(4, 8, 3))

    def forward(self, x: Tensor) -> Tensor:
        values, places = self.gate(x).topk(2)
        outputs = torch.einsum("bi,bkio->bko", x, self.weight[places])
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
            bag_values = self.bags(x.reshape(-1), offsets)
        else:
            bag_values = self.bags(x)
        logits: Tensor = self.head(bag_values)
        return logits


class EmbeddingTable(nn.Module):
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

"""A byte-level GPT whose hidden layers are mixtures of experts. Needs torch, not torchvision."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hypergpu.experts import Mixture
from hypergpu.workloads.datasets import Array, Dataset
from hypergpu.workloads.entry import Options
from hypergpu.workloads.evaluation import Sums
from hypergpu.workloads.examples import Example
from hypergpu.workloads.networks.models import VOCABULARY
from hypergpu.workloads.networks.task import NextByte
from hypergpu.workloads.networks.text_blocks import text_blocks

_BALANCE = 0.01
"""What the unevenness of a router's choice counts beside the loss."""


@dataclass(frozen=True)
class MixtureShape:
    """Sizes of a mixture."""

    width: int
    layers: int
    heads: int
    hidden: int
    """Units of an expert's hidden layer."""
    block_length: int
    mixture: Mixture


class _Expert(nn.Module):
    """One expert of one layer, with the vector that routers know it by."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.key = nn.Parameter(torch.empty(width))
        self.hidden_in = nn.Linear(width, hidden, bias=False)
        self.hidden_out = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.hidden_out(F.gelu(self.hidden_in(x)))
        return out


class MixtureLayer(nn.Module):
    """Sends each token to the best of the experts that it holds, and adds what these say of it,
    weighed by the router. Experts that are not held are not chosen, as if their scores were
    minus infinity.
    """

    def __init__(self, shape: MixtureShape, held: Sequence[int]) -> None:
        super().__init__()
        self.held = tuple(held)
        self.per_token = shape.mixture.per_token
        self.experts = nn.ModuleDict(
            {str(number): _Expert(shape.width, shape.hidden) for number in held}
        )
        self.imbalance = torch.zeros(())

    def forward(self, x: Tensor, tokens: nn.ModuleDict) -> Tensor:
        """``float[n, width]`` to the same; in training tokens are counted, too."""
        keys = torch.stack([each.get_parameter("key") for each in self.experts.values()])
        probabilities = F.softmax(x @ keys.T, dim=1)  # [n, held]
        weights, choices = probabilities.topk(self.per_token, dim=1)
        weights = weights / weights.sum(dim=1, keepdim=True)
        total, shares = torch.zeros_like(x), []
        for place, (number, expert) in enumerate(self.experts.items()):
            rows, ranks = (choices == place).nonzero(as_tuple=True)
            expert_output = expert(x[rows]) * weights[rows, ranks, None]
            total = total.index_add(0, rows, expert_output.to(total.dtype))
            shares.append(len(rows) / max(1, choices.numel()))
            if self.training:
                tokens.get_submodule(number).get_buffer("count").add_(len(rows))
        usual = probabilities.mean(dim=0)
        self.imbalance = len(self.held) * (usual * usual.new_tensor(shares)).sum()
        return total


class _TokenCount(nn.Module):
    """Tokens that were sent to one expert, of all layers, in training."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(1, dtype=torch.int64))


class _MixtureBlock(nn.Module):
    def __init__(self, shape: MixtureShape, held: Sequence[int]) -> None:
        super().__init__()
        width = shape.width
        self.heads = shape.heads
        self.attention_norm = nn.LayerNorm(width)
        self.attention_in = nn.Linear(width, 3 * width, bias=False)
        self.attention_out = nn.Linear(width, width, bias=False)
        self.hidden_norm = nn.LayerNorm(width)
        self.mixture = MixtureLayer(shape, held)

    def forward(self, x: Tensor, tokens: nn.ModuleDict) -> Tensor:
        batch, length, width = x.shape
        joint = self.attention_in(self.attention_norm(x))  # [b, t, 3w]
        split = joint.view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = split.permute(2, 0, 3, 1, 4)
        attention = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.attention_out(attention.transpose(1, 2).reshape(batch, length, width))
        expert_output: Tensor = self.mixture(self.hidden_norm(x).reshape(-1, width), tokens)
        return x + expert_output.view(batch, length, width)


class MixtureGpt(nn.Module):
    """Bytes in, logits of the next byte out.

    Args:
        shape: Sizes.
        held: Numbers of the experts that it has, ascending.
    """

    def __init__(self, shape: MixtureShape, held: Sequence[int]) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, shape.width)
        self.position = nn.Parameter(torch.empty(shape.block_length, shape.width))
        self.layers = nn.ModuleList(_MixtureBlock(shape, held) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.width)
        self.tokens = nn.ModuleDict({str(number): _TokenCount() for number in held})
        for name, parameter in self.named_parameters():
            if parameter.dim() > 1 or name.endswith(".key"):
                is_residual = name.endswith(("attention_out.weight", "hidden_out.weight"))
                std = 0.02 / (2 * shape.layers) ** 0.5 if is_residual else 0.02
                nn.init.normal_(parameter, std=std)

    def forward(self, inputs: Tensor) -> Tensor:
        """``int64[b, t]`` to ``float[b, t, 256]``."""
        x = self.embedding(inputs) + self.position[: inputs.shape[1]]
        for layer in self.layers:
            x = layer(x, self.tokens)
        return F.linear(self.norm(x), self.embedding.weight)

    def imbalance(self) -> Tensor:
        """How unevenly the routers chose in the newest pass, by layers; 1 is even."""
        mixtures = [each for each in self.modules() if isinstance(each, MixtureLayer)]
        return torch.stack([each.imbalance for each in mixtures]).mean()


@dataclass(frozen=True)
class ByteMixture:
    """The next byte at every place of a block, by a mixture. Implements `TorchWorkload` and
    `MixtureWorkload`.
    """

    shape: MixtureShape
    held: tuple[int, ...]
    text: NextByte

    @property
    def mixture(self) -> Mixture:
        """See `MixtureWorkload`."""
        return self.shape.mixture

    def expert_of(self, tensor: str) -> int | None:
        """See `MixtureWorkload`."""
        names = tensor.split(".")
        for place in ("experts", "tokens"):
            if place in names:
                return int(names[names.index(place) + 1])
        return None

    def holding(self, experts: Sequence[int]) -> "ByteMixture":
        """See `MixtureWorkload`."""
        return ByteMixture(self.shape, tuple(sorted(experts)), self.text)

    def load(self, data_dir: str) -> Dataset:
        """See `Workload`."""
        return self.text.load(data_dir)

    def model(self) -> nn.Module:
        """See `TorchWorkload`."""
        return MixtureGpt(self.shape, self.held)

    def loss(self, model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
        """Cross-entropy, and a little of the routers' unevenness in training."""
        loss = self.text.loss(model, inputs, targets)
        if not isinstance(model, MixtureGpt) or not model.training:
            return loss
        return loss + _BALANCE * model.imbalance()

    def evaluate(self, model: nn.Module, inputs: Tensor, targets: Tensor) -> Sums:
        """See `TorchWorkload`."""
        return self.text.evaluate(model, inputs, targets)

    def examples(self, inputs: Array, targets: Array) -> list[Example]:
        """See `ExampleWorkload`."""
        return self.text.examples(inputs, targets)

    def outputs(self, model: nn.Module, inputs: Tensor) -> list[int | str]:
        """See `ExampleWorkload`."""
        return self.text.outputs(model, inputs)


def byte_mixture(options: Options) -> ByteMixture:
    """Builder of ``text-mixture``."""
    block_length, corpus_bytes = int(options["block_length"]), int(options["corpus_bytes"])
    experts = int(options["experts"])
    shape = MixtureShape(
        width=int(options["width"]),
        layers=int(options["layers"]),
        heads=int(options["heads"]),
        hidden=int(options["hidden"]),
        block_length=block_length,
        mixture=Mixture(experts, int(options["held_experts"]), int(options["experts_per_token"])),
    )
    shape.mixture.check()
    text = NextByte(
        partial(MixtureGpt, shape, tuple(range(experts))),
        partial(text_blocks, block_length=block_length, corpus_bytes=corpus_bytes),
    )
    return ByteMixture(shape, tuple(range(experts)), text)

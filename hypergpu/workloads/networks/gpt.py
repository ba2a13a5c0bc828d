"""A byte-level GPT: pre-norm transformer decoder with learned positions and tied embeddings
(GPT-2's shape).
"""

from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hypergpu.workloads.entry import OptionError, Options
from hypergpu.workloads.networks.task import NextByte
from hypergpu.workloads.text import text_blocks

VOCABULARY = 256


class _Layer(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(width)
        self.attention_in = nn.Linear(width, 3 * width, bias=False)
        self.attention_out = nn.Linear(width, width, bias=False)
        self.hidden_norm = nn.LayerNorm(width)
        self.hidden_in = nn.Linear(width, 4 * width, bias=False)
        self.hidden_out = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        joint = self.attention_in(self.attention_norm(x))  # [b, t, 3w]
        split = joint.view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = split.permute(2, 0, 3, 1, 4)  # each [b, heads, t, w / heads]
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.attention_out(mixed.transpose(1, 2).reshape(batch, length, width))
        hidden: Tensor = self.hidden_out(F.gelu(self.hidden_in(self.hidden_norm(x))))
        return x + hidden


class Gpt(nn.Module):
    """Bytes in, logits of the next byte out."""

    def __init__(self, *, width: int, layers: int, heads: int, block_length: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.position = nn.Parameter(torch.empty(block_length, width))
        self.layers = nn.ModuleList(_Layer(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        for name, parameter in self.named_parameters():
            if parameter.dim() > 1:
                # Layers that add to the residual stream start smaller, so that its size does not
                # grow with depth.
                is_residual = name.endswith(("attention_out.weight", "hidden_out.weight"))
                nn.init.normal_(parameter, std=0.02 / (2 * layers) ** 0.5 if is_residual else 0.02)

    def forward(self, inputs: Tensor) -> Tensor:
        """``int64[b, t]`` to ``float[b, t, 256]``."""
        x = self.embedding(inputs) + self.position[: inputs.shape[1]]
        for layer in self.layers:
            x = layer(x)
        return F.linear(self.norm(x), self.embedding.weight)


def gpt(options: Options) -> NextByte:
    """Builder of ``text-gpt``."""
    width, heads = int(options["width"]), int(options["heads"])
    block_length = int(options["block_length"])
    if width % heads:
        raise OptionError(
            f"options.width is {width} and options.heads is {heads}; heads must divide width"
        )
    return NextByte(
        partial(
            Gpt, width=width, layers=int(options["layers"]), heads=heads, block_length=block_length
        ),
        partial(text_blocks, block_length=block_length, corpus_bytes=int(options["corpus_bytes"])),
    )

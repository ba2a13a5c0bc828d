"""Networks for the digits, and a byte-level GPT. Needs torch, not torchvision."""

from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hypergpu.workloads.datasets import Dataset
from hypergpu.workloads.digits import CLASSES, PIXELS, digits, draw_digits
from hypergpu.workloads.entry import Options
from hypergpu.workloads.networks.task import Classification, NextByte
from hypergpu.workloads.networks.text_blocks import held_out_blocks, node_blocks, text_blocks
from hypergpu.workloads.node_data import NodeDataReaders


def _read(_data_dir: str) -> Dataset:
    return digits()


def _as_images(inputs: Tensor) -> Tensor:
    return inputs.view(-1, 1, 8, 8)


def mlp(options: Options) -> Classification:
    """Builder of ``digits-mlp``: two hidden layers."""
    width = int(options["width"])

    def make() -> nn.Module:
        return nn.Sequential(
            nn.Linear(PIXELS, width),
            nn.ReLU(),
            nn.Linear(width, width),
            nn.ReLU(),
            nn.Linear(width, CLASSES),
        )

    return Classification(make, _read, draw=draw_digits)


def cnn(options: Options) -> Classification:
    """Builder of ``digits-cnn``: three convolutions with group normalisation and a hidden layer.

    Group normalisation has no running statistics to average between nodes. Nearly all weights lie
    in tensors of 4,096 elements or more, which the codecs compress.
    """
    channels = int(options["channels"])

    def make() -> nn.Module:
        return nn.Sequential(
            *_convolution(1, channels),
            nn.MaxPool2d(2),
            *_convolution(channels, 2 * channels),
            *_convolution(2 * channels, 2 * channels),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(8 * channels, 4 * channels),
            nn.ReLU(),
            nn.Linear(4 * channels, CLASSES),
        )

    return Classification(make, _read, prepare=_as_images, draw=draw_digits)


def _convolution(inputs: int, outputs: int) -> tuple[nn.Module, ...]:
    return nn.Conv2d(inputs, outputs, 3, padding=1), nn.GroupNorm(4, outputs), nn.ReLU()


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
        attention = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.attention_out(attention.transpose(1, 2).reshape(batch, length, width))
        hidden_state: Tensor = self.hidden_out(F.gelu(self.hidden_in(self.hidden_norm(x))))
        return x + hidden_state


class Gpt(nn.Module):
    """Bytes in, logits of the next byte out."""

    def __init__(self, *, width: int, layers: int, heads: int, block_length: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.position = nn.Parameter(torch.empty(block_length, width))
        self.layers = nn.ModuleList(_Layer(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        # The embedding is the output layer too, so that no layer's weight is the last.
        self.hidden_weights = frozenset(
            name
            for name, parameter in self.named_parameters()
            if name.startswith("layers.") and parameter.dim() > 1
        )
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
    block_length, corpus_bytes = int(options["block_length"]), int(options["corpus_bytes"])
    node_data = NodeDataReaders(
        partial(held_out_blocks, block_length=block_length, corpus_bytes=corpus_bytes),
        partial(node_blocks, block_length=block_length, corpus_bytes=corpus_bytes),
    )
    return NextByte(
        partial(
            Gpt, width=width, layers=int(options["layers"]), heads=heads, block_length=block_length
        ),
        partial(text_blocks, block_length=block_length, corpus_bytes=corpus_bytes),
        node_data,
    )

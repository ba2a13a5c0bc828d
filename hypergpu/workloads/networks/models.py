"""Networks for the digits, and a byte-level GPT with the text that it reads. Needs torch, not
torchvision.

Reading a folder of text into fixed blocks of bytes, the same on every machine that holds the
same files.

The default is the source of Python's own standard library. It differs a little between Python
versions; the corpus's size does not, since it is cut at ``corpus_bytes``.
"""

import os
import sysconfig
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F

from hypergpu.workloads.datasets import NO_SAMPLES, Array, Dataset, DatasetError
from hypergpu.workloads.digits import CLASSES, PIXELS, digits, draw_digits
from hypergpu.workloads.entry import Options
from hypergpu.workloads.held_out import held_out_places
from hypergpu.workloads.networks.task import Classification, NextByte
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


_SUFFIXES = frozenset(
    {".py", ".txt", ".md", ".rst", ".toml", ".json", ".csv", ".html", ".c", ".h", ".tex"}
)
_LEFT_OUT = frozenset({"site-packages", "dist-packages", "__pycache__", "test", "tests", "idlelib"})
_RUN_BYTES = 16 << 10
_RUNS_LEAST = 2
"""One to train on and one that is held out."""
_FILE_BYTES_MAX = 64 << 20


class Blocks:
    """Blocks of a corpus: the input is a block's bytes, the target the same moved on by one.
    Implements `Samples`.
    """

    def __init__(
        self, corpus: NDArray[np.uint8], starts: NDArray[np.int64], block_length: int
    ) -> None:
        self._corpus = corpus
        self._starts = starts
        self._offsets = np.arange(block_length + 1)
        self._labels = starts // _RUN_BYTES

    @property
    def labels(self) -> NDArray[np.int64]:
        """The 16 KiB run a block lies in: label skew then divides the text by topic."""
        return self._labels

    def batch(self, indices: NDArray[np.int64]) -> tuple[Array, Array]:
        """``uint8[b, block_length]`` twice."""
        blocks = self._corpus[self._starts[indices][:, None] + self._offsets]
        return blocks[:, :-1], blocks[:, 1:]


def text_blocks(data_dir: str, block_length: int, corpus_bytes: int) -> Dataset:
    """Blocks of a folder's text; of each ten runs of 16 KiB one is held out, drawn.

    Args:
        data_dir: A folder of text files (by suffix), or "" for the standard library's source.
        block_length: Bytes the model sees at once.
        corpus_bytes: Where the corpus is cut; 0 takes everything.

    Raises:
        DatasetError: There is too little text: fewer than two runs that hold a block.
    """
    folder = Path(data_dir or sysconfig.get_paths()["stdlib"])
    corpus = _corpus(folder, corpus_bytes)
    starts = _block_starts(corpus, block_length)
    run = starts // _RUN_BYTES
    # A block that reaches into the next run would show training text to the evaluation.
    is_whole = (starts + block_length) // _RUN_BYTES == run
    starts, run = starts[is_whole], run[is_whole]
    # Repeated text has a period, so that runs at fixed places would not be like the others.
    places, run_index = np.unique(run, return_inverse=True)
    if len(places) < _RUNS_LEAST:
        raise DatasetError(
            f"{folder} holds {len(corpus)} bytes of text;"
            f" at least {_RUNS_LEAST * _RUN_BYTES} are needed."
            f" Fix: add files ending in {', '.join(sorted(_SUFFIXES))}"
        )
    is_test = np.array(held_out_places([None] * len(places)))[run_index]
    return Dataset(
        Blocks(corpus, starts[~is_test], block_length),
        Blocks(corpus, starts[is_test], block_length),
    )


def held_out_blocks(data_dir: str, block_length: int, corpus_bytes: int) -> Dataset:
    """All blocks of a folder's text, held out. Raises `DatasetError`: there is none."""
    blocks = node_blocks("", data_dir, block_length=block_length, corpus_bytes=corpus_bytes)
    if not len(blocks.labels):
        raise DatasetError(f"{data_dir} holds no block of {block_length} bytes of text")
    return Dataset(NO_SAMPLES, blocks)


def node_blocks(_data_dir: str, node_dir: str, *, block_length: int, corpus_bytes: int) -> Blocks:
    """All blocks of the text in a node's own folder, which is cut at ``corpus_bytes``, too."""
    corpus = _corpus(Path(node_dir), corpus_bytes)
    return Blocks(corpus, _block_starts(corpus, block_length), block_length)


def _block_starts(corpus: NDArray[np.uint8], block_length: int) -> NDArray[np.int64]:
    return np.arange(0, len(corpus) - block_length - 1, block_length, dtype=np.int64)


def _corpus(folder: Path, corpus_bytes: int) -> NDArray[np.uint8]:
    pieces: list[bytes] = []
    left = corpus_bytes or 1 << 62
    for path in _text_files(folder):
        if left <= 0:
            break
        with path.open("rb") as file:
            pieces.append(file.read(min(left, _FILE_BYTES_MAX)))
        left -= len(pieces[-1])
    return np.frombuffer(b"".join(pieces), dtype=np.uint8)


def _text_files(folder: Path) -> Iterator[Path]:
    """Files in an order that no file system decides."""
    for parent, folders, names in os.walk(folder):
        folders[:] = sorted(set(folders) - _LEFT_OUT)
        for name in sorted(names):
            path = Path(parent, name)
            if path.suffix.lower() in _SUFFIXES and path.is_file():
                yield path


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

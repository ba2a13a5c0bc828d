"""Folders of text as fixed blocks of bytes, the same on every machine that holds the same files.

The default is the source of Python's own standard library. It differs a little between Python
versions; the corpus's size does not, since it is cut at ``corpus_bytes``.
"""

import os
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from hypergpu.workloads.datasets import NO_SAMPLES, Array, Dataset, DatasetError
from hypergpu.workloads.held_out import held_out_places

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
    Implements `SampleSource`.
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
    left_bytes = corpus_bytes or 1 << 62
    for path in _text_files(folder):
        if left_bytes <= 0:
            break
        with path.open("rb") as file:
            pieces.append(file.read(min(left_bytes, _FILE_BYTES_MAX)))
        left_bytes -= len(pieces[-1])
    return np.frombuffer(b"".join(pieces), dtype=np.uint8)


def _text_files(folder: Path) -> Iterator[Path]:
    """Files in an order that no file system decides."""
    for parent, folders, names in os.walk(folder):
        folders[:] = sorted(set(folders) - _LEFT_OUT)
        for name in sorted(names):
            path = Path(parent, name)
            if path.suffix.lower() in _SUFFIXES and path.is_file():
                yield path

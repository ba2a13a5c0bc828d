"""Reading a folder of text into fixed blocks of bytes, the same on every machine that holds the
same files.

The default is the source of Python's own standard library. It differs a little between Python
versions; the corpus's size does not, since it is cut at ``corpus_bytes``.
"""

import os
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from hypergpu.workloads.workload import Array, Dataset, DatasetError

_SUFFIXES = frozenset(
    {".py", ".txt", ".md", ".rst", ".toml", ".json", ".csv", ".html", ".c", ".h", ".tex"}
)
_LEFT_OUT = frozenset({"site-packages", "dist-packages", "__pycache__", "test", "tests", "idlelib"})
_RUN_BYTES = 16 << 10
_TEST_EVERY = 20
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
    """Blocks of a folder's text; every twentieth run of 16 KiB is held out.

    Args:
        data_dir: A folder of text files (by suffix), or "" for the standard library's source.
        block_length: Bytes the model sees at once.
        corpus_bytes: Where the corpus is cut; 0 takes everything.

    Raises:
        DatasetError: There is too little text.
    """
    folder = Path(data_dir or sysconfig.get_paths()["stdlib"])
    corpus = _corpus(folder, corpus_bytes)
    starts = np.arange(0, len(corpus) - block_length - 1, block_length, dtype=np.int64)
    run = starts // _RUN_BYTES
    # A block that reaches into the next run would show training text to the evaluation.
    is_whole = (starts + block_length) // _RUN_BYTES == run
    is_test = run % _TEST_EVERY == _TEST_EVERY - 1
    train, test = starts[is_whole & ~is_test], starts[is_whole & is_test]
    if not len(train) or not len(test):
        raise DatasetError(
            f"{folder} holds {len(corpus)} bytes of text;"
            f" at least {_TEST_EVERY * _RUN_BYTES} are needed."
            f" Fix: add files ending in {', '.join(sorted(_SUFFIXES))}"
        )
    return Dataset(Blocks(corpus, train, block_length), Blocks(corpus, test, block_length))


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

"""Rows of tokens as one file: what a ring trains on, made by the user's own tokenizer.

``magic | uint32 rows | uint32 length of each row | int32 tokens of all | int32 labels of all``,
little-endian. Sizes are checked against the file's before anything is read.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hypergpu.errors import HyperGPUError, Reason

IGNORED = -100
"""Label of a token that does not count, as transformers has it."""
ROW_TOKENS_MOST = 65_536
_MAGIC = b"hgrows1\n"
_HEAD_BYTES = len(_MAGIC) + 4
TokenNumbers = NDArray[np.int32]


class LabelledRow(NamedTuple):
    """A row of tokens."""

    tokens: TokenNumbers
    labels: TokenNumbers
    """The tokens that count, `IGNORED` elsewhere. The first is never predicted."""

    @property
    def counted_tokens(self) -> int:
        """How many tokens count."""
        return int((self.labels[1:] != IGNORED).sum())


def write_rows(rows: Iterable[tuple[TokenNumbers, TokenNumbers]], path: Path) -> int:
    """Write rows of tokens and labels; gives how many."""
    all_rows = [(tokens, labels) for tokens, labels in rows]
    lengths = np.array([len(tokens) for tokens, _ in all_rows], "<u4")
    with path.open("wb") as file:
        file.write(_MAGIC + np.array([len(all_rows)], "<u4").tobytes() + lengths.tobytes())
        for part in (0, 1):
            for row in all_rows:
                file.write(row[part].astype("<i4").tobytes())
    return len(all_rows)


class TokenRows:
    """Rows of a file, each of which is read as it is asked for.

    Args:
        path: The file.

    Raises:
        HyperGPUError: REQUEST_INVALID, it is no such file.
    """

    def __init__(self, path: Path) -> None:
        size_bytes = path.stat().st_size
        with path.open("rb") as file:
            head = file.read(_HEAD_BYTES)
            if len(head) < _HEAD_BYTES or not head.startswith(_MAGIC):
                raise _malformed_file("it does not begin as one")
            count = int(np.frombuffer(head[len(_MAGIC) :], "<u4")[0])
            if not 0 < count <= (size_bytes - _HEAD_BYTES) // 4:
                raise _malformed_file(f"it states {count} rows")
            lengths = np.frombuffer(file.read(4 * count), "<u4").astype(np.int64)
        total = int(lengths.sum())
        if size_bytes != _HEAD_BYTES + 4 * count + 8 * total:
            raise _malformed_file("it has another size than its rows")
        if lengths.min() < 2 or lengths.max() > ROW_TOKENS_MOST:
            raise _malformed_file(f"a row has 2 to {ROW_TOKENS_MOST} tokens")
        self._starts = np.concatenate([[0], np.cumsum(lengths)])
        self._values = np.memmap(path, "<i4", "r", _HEAD_BYTES + 4 * count, (2, total))

    def __len__(self) -> int:
        return len(self._starts) - 1

    @property
    def longest(self) -> int:
        """Tokens of the longest row."""
        return int(np.diff(self._starts).max())

    @property
    def mean_tokens(self) -> float:
        """Tokens of a row on average."""
        return float(self._starts[-1] / len(self))

    def row(self, number: int) -> LabelledRow:
        """One row, from 0 on."""
        here = slice(self._starts[number], self._starts[number + 1])
        tokens, labels = (np.array(part[here], np.int32) for part in self._values)
        return LabelledRow(tokens, labels)


def rows_of_step(count: int, batch_rows: int, step: int, seed: int) -> Sequence[int]:
    """Numbers of the rows of a step: each pass over all of them in an order of its own.

    Args:
        count: Rows that there are.
        batch_rows: Rows of a step.
        step: From 0 on.
        seed: Of the order.
    """
    first = step * batch_rows
    numbers = list[int]()
    while len(numbers) < batch_rows:
        place = first + len(numbers)
        order = np.random.default_rng((seed, place // count)).permutation(count)
        start = place % count
        numbers += order[start : start + batch_rows - len(numbers)].tolist()
    return numbers


def _malformed_file(why: str) -> HyperGPUError:
    detail = f"the file of training rows is malformed: {why}"
    return HyperGPUError(Reason.REQUEST_INVALID, detail, fix="submit the job anew")

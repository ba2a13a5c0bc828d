"""Parts of a data set by the usual names of its files and folders."""

import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

TRAIN, HELD_OUT = "train", "held_out"
_SPLITS = (
    (TRAIN, ("train", "training")),
    (HELD_OUT, ("held_out", "heldout", "held-out")),
    ("validation", ("validation", "valid", "val", "dev", "eval")),
    ("test", ("test", "testing")),
)
"""Splits with their names; of those behind ``train`` the first that is there is held out."""
_SPLIT_NAMES = {name: split for split, names in _SPLITS for name in names}
_SPLIT = re.compile(
    rf"({'|'.join(sorted(_SPLIT_NAMES, key=len, reverse=True))})(\d*(?:[-_.].*)?)", re.IGNORECASE
)
_HAS_WORDS = re.compile(r"(?<![a-z])(?!of(?![a-z]))[a-z]+", re.IGNORECASE)


class SplitFiles(NamedTuple):
    """Files by the part that they are, in the order that they were given."""

    train: tuple[Path, ...]
    held_out: tuple[Path, ...]


def split_of(path: Path, *, is_text: bool = False) -> str:
    """The part that a relative path names: ``train``, ``held_out``, ``validation`` or ``test``;
    empty: none.

    Args:
        path: Folders and a name, such as ``data/train-00000-of-00002.parquet``.
        is_text: Whether words behind a part's name make another name, as in ``test_notes.md``.
    """
    for name in (*path.parts[:-1], path.stem):
        match = _SPLIT.fullmatch(name)
        if match and not (is_text and _HAS_WORDS.search(match[2])):
            return _SPLIT_NAMES[match[1].lower()]
    return ""


def split_files(paths: Iterable[Path], part_of: Callable[[Path], str]) -> SplitFiles:
    """Divide files: where some are named after a part to train on, others that name none are
    neither; where all name one part, they are trained on.

    Args:
        paths: The files.
        part_of: The part that each names, see `split_of`.
    """
    by_part: dict[str, list[Path]] = {}
    for path in paths:
        by_part.setdefault(part_of(path), []).append(path)
    held_out = next((by_part[name] for name, _ in _SPLITS[1:] if name in by_part), [])
    train = by_part.get(TRAIN) or by_part.get("", [])
    if not train and len(by_part) == 1:
        train, held_out = held_out, []
    return SplitFiles(tuple(train), tuple(held_out))

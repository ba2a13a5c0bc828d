"""Files of a folder of rows: which are trained on, held out and left, by splits' usual names."""

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from hypergpu.units import several
from hypergpu.workloads.splits import split_files, split_of

BASE_NAME_FILE = "hypergpu-base-name"
"""In the base's folder: its name on the hub."""
BASE_FOLDER = "base"
"""Part of a job's folder that holds the model which gets an adapter."""
TEXT = frozenset({".txt", ".md", ".rst", ".py"})
_OBJECTS = (".jsonl", ".parquet", ".json", ".csv")
SUFFIXES = (*_OBJECTS, *sorted(TEXT))
_SETTINGS = re.compile(
    r"(dataset_infos?|dataset_dict|state|metadata|config|croissant)\.json", re.IGNORECASE
)
"""Files that describe a data set and hold none of its rows."""
_SHOWN_MOST = 4


class RowFiles(NamedTuple):
    """Files of a folder by what becomes of them, in an order that no file system decides."""

    folder: Path
    train: tuple[Path, ...]
    held_out: tuple[Path, ...]
    left_out: tuple[Path, ...] = ()

    def only_held_out(self) -> "RowFiles":
        """The same where all is held out: files that state no part are, too."""
        if self.held_out:
            return self._replace(train=(), left_out=(*self.left_out, *self.train))
        return self._replace(train=(), held_out=self.train)

    @property
    def summary(self) -> str:
        """What was taken and what was left, for people."""
        held_out = self._names(self.held_out) or "a tenth of these rows, drawn"
        parts = [f"trained on {self._names(self.train)}"] if self.train else []
        return "; ".join([*parts, f"held out {held_out}"]) + self.told_left_out

    @property
    def told_left_out(self) -> str:
        """What was left, to end a sentence with; empty: nothing."""
        return f"; left out {self._names(self.left_out)}" if self.left_out else ""

    def _names(self, paths: Sequence[Path]) -> str:
        names = [path.relative_to(self.folder).as_posix() for path in paths[:_SHOWN_MOST]]
        hidden_count = len(paths) - len(names)
        return ", ".join(names) + (
            f" and {several(hidden_count, 'other file')}" if hidden_count > 0 else ""
        )


def choose_files(folder: Path) -> RowFiles:
    """Divide a folder's files.

    Where files are named after a part to train on, others that name none are left. Text is taken
    where there are no other rows, or where its name states a part that has none.
    """
    paths = _files_of(folder)
    rows = [path for path in paths if _is_rows(path)]
    texts = [path for path in paths if path.suffix.lower() in TEXT]
    named_texts = [path for path in texts if _part_of(folder, path)]
    if rows or named_texts:
        with_rows = {_part_of(folder, path) for path in rows}
        rows += [path for path in named_texts if _part_of(folder, path) not in with_rows]
    else:
        rows = texts
    train, held_out = split_files(rows, lambda path: _part_of(folder, path))
    taken_paths = {*train, *held_out}
    left_out = tuple(path for path in paths if path not in taken_paths)
    return RowFiles(folder, train, held_out, left_out)


def _part_of(folder: Path, path: Path) -> str:
    return split_of(path.relative_to(folder), is_text=path.suffix.lower() in TEXT)


def _is_rows(path: Path) -> bool:
    return path.suffix.lower() in _OBJECTS and not _SETTINGS.fullmatch(path.name)


def _files_of(folder: Path) -> list[Path]:
    """All files but the base's and hidden ones."""
    file_paths: Iterable[Path] = (path for path in folder.rglob("*") if path.is_file())
    parts = {path: path.relative_to(folder).parts for path in file_paths}
    chosen_paths = (
        path
        for path, names in parts.items()
        if names[0] != BASE_FOLDER and not any(name.startswith(".") for name in names)
    )
    return sorted(chosen_paths, key=lambda path: parts[path])

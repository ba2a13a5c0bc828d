"""Rows of a folder as people have them for TRL, read the same on every machine: text files, JSON
lines and parquet, one part to train on and one held out.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from blake3 import blake3

from hypergpu.workloads.workload import DatasetError

BASE_FOLDER = "base"
"""Part of a job's folder that holds the model which gets an adapter."""
CONFIG = "config.json"
"""The base's file of settings."""
HELD_OUT = "held_out"
"""Name of the file, or folder of files, with held-out rows."""
_HELD_OUT_EVERY = 10
_TEXT = frozenset({".txt", ".md", ".rst", ".py"})
SUFFIXES = (*sorted(_TEXT), ".jsonl", ".parquet")
_RUN_CHARACTERS = 4096
_LINE_BYTES_MOST = 64 << 20


def base_digest(folder: Path) -> str:
    """BLAKE3 of the files that decide what the base computes: settings and weights, by name."""
    running = blake3()
    for path in [folder / CONFIG, *sorted(folder.glob("*.safetensors"))]:
        part = blake3(max_threads=blake3.AUTO)
        part.update_mmap(path)
        running.update(f"{path.name}\0{part.hexdigest()}\0".encode())
    return running.hexdigest()


class DataRow(NamedTuple):
    """One row of a file."""

    values: Mapping[str, Any]
    source: int
    """The file's number among those of its part."""
    place: str
    """For messages: file and line."""


class RowParts(NamedTuple):
    """All rows of a folder."""

    train: list[DataRow]
    held_out: list[DataRow]


def read_rows(folder: Path) -> RowParts:
    """Rows of a folder. Without a part ``held_out`` each tenth row is held out.

    Files of text are rows of about 4,096 characters with the field ``text``.

    Raises:
        DatasetError: There are too few, or a file cannot be read.
    """
    files = _row_files(folder)
    held_out = [path for path in files if _part_of(folder, path) == HELD_OUT]
    train = [path for path in files if path not in held_out]
    rows, kept = _rows_of(folder, train), _rows_of(folder, held_out)
    if not held_out:
        kept = rows[_HELD_OUT_EVERY - 1 :: _HELD_OUT_EVERY] or rows[1:][-1:]
        left_out = {id(row) for row in kept}
        rows = [row for row in rows if id(row) not in left_out]
    if not rows or not kept:
        raise DatasetError(
            f"{folder} holds {len(rows)} rows to train on and {len(kept)} to hold out; each part"
            f" needs one. Fix: add files ending in {', '.join(SUFFIXES)}"
        )
    return RowParts(rows, kept)


def all_rows(folder: Path) -> list[DataRow]:
    """Rows of a folder that is one part alone: held out, or a node's own.

    Raises:
        DatasetError: A file cannot be read.
    """
    return _rows_of(folder, _row_files(folder))


def _row_files(folder: Path) -> list[Path]:
    found = (path for path in folder.rglob("*") if path.suffix in SUFFIXES and path.is_file())
    parts = {path: path.relative_to(folder).parts for path in found}
    return sorted(
        (path for path, names in parts.items() if names[0] != BASE_FOLDER),
        key=lambda path: parts[path],
    )


def _part_of(folder: Path, path: Path) -> str:
    first = path.relative_to(folder).parts[0]
    return first if first == HELD_OUT else Path(first).stem


def _rows_of(folder: Path, files: list[Path]) -> list[DataRow]:
    rows: list[DataRow] = []
    for source, path in enumerate(files):
        name = path.relative_to(folder).as_posix()
        try:
            rows += (DataRow(*each) for each in _rows_of_file(path, source, name))
        except OSError as broken:
            raise DatasetError(f"{name} cannot be read: {broken.strerror}") from broken
        except UnicodeDecodeError as broken:
            raise DatasetError(f"{name} is not UTF-8: {broken.reason}. Fix: convert it") from broken
    return rows


def _rows_of_file(
    path: Path, source: int, name: str
) -> Iterator[tuple[Mapping[str, Any], int, str]]:
    if path.suffix in _TEXT:
        for line, text in _text_runs(path):
            yield {"text": text}, source, f"{name}, line {line}"
        return
    read = _json_lines if path.suffix == ".jsonl" else _parquet_rows
    for number, values in read(path, name):
        yield values, source, f"{name}, row {number}"


def _text_runs(path: Path) -> Iterator[tuple[int, str]]:
    """Runs of whole lines with the number of their first: as long as a page, so that a large file
    has some to hold out.
    """
    first, run, count = 1, [], 0
    with path.open(encoding="utf-8", newline="") as file:
        for number, line in enumerate(iter(lambda: file.readline(_RUN_CHARACTERS), ""), 1):
            run.append(line)
            count += len(line)
            if count >= _RUN_CHARACTERS:
                yield first, "".join(run)
                first, run, count = number + 1, [], 0
    if "".join(run).strip():
        yield first, "".join(run)


def _json_lines(path: Path, name: str) -> Iterator[tuple[int, Mapping[str, Any]]]:
    with path.open("rb") as file:
        for number, line in enumerate(iter(lambda: file.readline(_LINE_BYTES_MOST + 1), b""), 1):
            if len(line) > _LINE_BYTES_MOST:
                raise DatasetError(f"{name}, row {number}: more than {_LINE_BYTES_MOST} bytes")
            if not line.strip():
                continue
            try:
                values = msgspec.json.decode(line)
            except msgspec.DecodeError as broken:
                raise DatasetError(f"{name}, row {number} is no JSON: {broken}") from broken
            if not isinstance(values, dict):
                raise DatasetError(f'{name}, row {number}: a row is an object like {{"text": ...}}')
            yield number, values


def _parquet_rows(path: Path, name: str) -> Iterator[tuple[int, Mapping[str, Any]]]:
    try:
        from pyarrow import ArrowException, parquet
    except ModuleNotFoundError:
        raise DatasetError(f"{name} needs pyarrow. Fix: pip install 'hypergpu[parquet]'") from None
    number = 0
    try:
        with parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(1024):
                for values in batch.to_pylist():
                    number += 1
                    yield number, values
    except ArrowException as broken:
        raise DatasetError(f"{name} cannot be read: {broken}") from broken

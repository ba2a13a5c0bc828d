"""Rows of a folder as people have them for TRL, read the same on every machine: JSON, CSV, parquet
and text files, one part to train on and one held out.
"""

import csv
from codecs import BOM_UTF8
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from blake3 import blake3

from hypergpu.workloads.datasets import DatasetError
from hypergpu.workloads.finetuning.row_files import SUFFIXES, TEXT, RowFiles, choose_files
from hypergpu.workloads.held_out import held_out_places
from hypergpu.workloads.splits import HELD_OUT, TRAIN

CONFIG = "config.json"
"""The base's file of settings."""
_RUN_CHARACTERS = 4096
_LINE_BYTES_MOST = 64 << 20
_JSON_BYTES_MOST = 1 << 30


def base_digest(folder: Path) -> str:
    """BLAKE3 of the files that decide what the base computes: settings and weights, by name."""
    hasher = blake3()
    for path in [folder / CONFIG, *sorted(folder.glob("*.safetensors"))]:
        part = blake3(max_threads=blake3.AUTO)
        part.update_mmap(path)
        hasher.update(f"{path.name}\0{part.hexdigest()}\0".encode())
    return hasher.hexdigest()


class DataRow(NamedTuple):
    """One row of a file."""

    values: Mapping[str, Any]
    source: int
    """The file's number among those of its part."""
    place: str
    """For messages: file and line."""


class RowParts(NamedTuple):
    """All rows of a folder, with the files that they are from."""

    train: list[DataRow]
    held_out: list[DataRow]
    files: RowFiles


class FileRows(NamedTuple):
    """Rows of one part of a folder, with the files that they are from."""

    rows: list[DataRow]
    files: RowFiles


def read_rows(folder: Path) -> RowParts:
    """Rows of a folder. Where no files are held out, a tenth of the rows is drawn, of each class
    where rows have a ``label``.

    Files of text are rows of about 4,096 characters with the field ``text``.

    Raises:
        DatasetError: There are too few, or a file cannot be read.
    """
    files = choose_files(folder)
    rows, held_out_rows = _rows_of(folder, files.train), _rows_of(folder, files.held_out)
    if not files.held_out:
        places = held_out_places(_label_of(row) for row in rows)
        held_out_rows = [row for row, is_held_out in zip(rows, places, strict=True) if is_held_out]
        rows = [row for row, is_held_out in zip(rows, places, strict=True) if not is_held_out]
    if not rows or not held_out_rows:
        raise DatasetError(
            f"{folder.name} holds {len(rows)} rows to train on and {len(held_out_rows)} to hold"
            f" out; each part needs one{files.told_left_out}."
            f" Fix: add files ending in {', '.join(SUFFIXES)}"
        )
    return RowParts(rows, held_out_rows, files)


def all_rows(folder: Path, part: str = TRAIN) -> FileRows:
    """Rows of a folder that is one part alone: held out, or a node's own.

    Args:
        folder: Where they lie.
        part: Which files are taken where their names state parts: ``train`` or ``held_out``.

    Raises:
        DatasetError: A file cannot be read.
    """
    files = choose_files(folder)
    if part == HELD_OUT:
        files = files.only_held_out()
        return FileRows(_rows_of(folder, files.held_out), files)
    return FileRows(_rows_of(folder, files.train), files)


def _label_of(row: DataRow) -> str | int | float | None:
    label = row.values.get("label")
    return label if isinstance(label, str | int | float) else None


def _rows_of(folder: Path, files: Sequence[Path]) -> list[DataRow]:
    rows: list[DataRow] = []
    for source, path in enumerate(files):
        name = path.relative_to(folder).as_posix()
        try:
            rows += (DataRow(*each) for each in file_rows(path, source, name))
        except OSError as error:
            raise DatasetError(f"{name} cannot be read: {error.strerror}") from error
        except UnicodeDecodeError as error:
            raise DatasetError(f"{name} is not UTF-8: {error.reason}. Fix: convert it") from error
    return rows


def file_rows(path: Path, source: int, name: str) -> Iterator[tuple[Mapping[str, Any], int, str]]:
    """Rows of one file, each with ``source`` and its place for messages.

    Raises:
        DatasetError: The file is not of its kind.
        OSError: It cannot be read.
    """
    suffix = path.suffix.lower()
    if suffix in TEXT:
        for line, text in _text_runs(path):
            yield {"text": text}, source, f"{name}, line {line}"
        return
    read = {".jsonl": _json_lines, ".json": _json_rows, ".csv": _csv_rows}.get(
        suffix, _parquet_rows
    )
    for number, values in read(path, name):
        yield values, source, f"{name}, row {number}"


def _text_runs(path: Path) -> Iterator[tuple[int, str]]:
    """Runs of whole lines with the number of their first: as long as a page, so that a large file
    has some to hold out.
    """
    first, run, count = 1, [], 0
    with path.open(encoding="utf-8-sig", newline="") as file:
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
            plain = line.removeprefix(BOM_UTF8) if number == 1 else line
            if not plain.strip():
                continue
            try:
                values = msgspec.json.decode(plain)
            except msgspec.DecodeError as error:
                raise DatasetError(
                    f"{name}, row {number} is no JSON: {error}."
                    " Fix: write one object a line, in UTF-8"
                ) from error
            yield number, _object_of(values, name, number)


def _object_of(values: Any, name: str, number: int) -> Mapping[str, Any]:
    if isinstance(values, dict):
        return values
    raise DatasetError(
        f'{name}, row {number} is no object. Fix: write each row as an object like {{"text": ...}}'
    )


def _json_rows(path: Path, name: str) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """Rows of a file with one list of objects; a file of JSON lines may bear this name, too."""
    if path.stat().st_size > _JSON_BYTES_MOST:
        raise DatasetError(
            f"{name} has more than {_JSON_BYTES_MOST} bytes. Fix: write one object a line as .jsonl"
        )
    content = path.read_bytes().removeprefix(BOM_UTF8)
    if not content.lstrip().startswith(b"["):
        yield from _json_lines(path, name)
        return
    try:
        rows = msgspec.json.decode(content, type=list[Any])
    except msgspec.DecodeError as error:
        raise DatasetError(
            f"{name} is no JSON: {error}. Fix: write a list of objects, in UTF-8"
        ) from error
    for number, values in enumerate(rows, 1):
        yield number, _object_of(values, name, number)


def _csv_rows(path: Path, name: str) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """Rows of a file whose first line has the fields' names; all values are texts."""
    with path.open(encoding="utf-8-sig", newline="") as file:
        reader = csv.DictReader(file, strict=True)
        try:
            for number, values in enumerate(reader, 1):
                if None in values or None in values.values():
                    raise DatasetError(
                        f"{name}, row {number} has not as many values as the first line has names."
                        " Fix: put values with commas or line ends in quotation marks"
                    )
                yield number, values
        except csv.Error as error:
            raise DatasetError(
                f"{name}, line {reader.line_num + 1} is no CSV: {error}."
                " Fix: put values with commas or line ends in quotation marks"
            ) from error


def _parquet_rows(path: Path, name: str) -> Iterator[tuple[int, Mapping[str, Any]]]:
    try:
        from pyarrow import ArrowException, parquet
    except ModuleNotFoundError:
        raise DatasetError(f"{name} needs pyarrow. Fix: pip install 'hypergpu[parquet]'") from None
    number = 0
    try:
        with parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(1024):
                columns = [_column_list(column) for column in batch.columns]
                for values in zip(*columns, strict=True):
                    number += 1
                    yield number, dict(zip(batch.schema.names, values, strict=True))
    except ArrowException as error:
        raise DatasetError(f"{name} cannot be read: {error}") from error


def _column_list(column: Any) -> list[Any]:
    """Values of a column of pyarrow, one a row; a tensor is lists in lists, in its own order."""
    import pyarrow as pa

    if not isinstance(column, pa.FixedShapeTensorArray):
        values: list[Any] = column.to_pylist()
        return values
    # pyarrow gives a tensor's numbers in the order of storage, without its shape.
    tensors = iter(column.drop_null().to_numpy_ndarray().tolist())
    return [next(tensors) if is_there else None for is_there in column.is_valid().to_pylist()]

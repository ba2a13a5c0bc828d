"""Files of samples as people have them, ``.npz`` and ``.parquet``, as batches of named arrays."""

import zipfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hypergpu.programs.container import Field
from hypergpu.programs.samples import FieldArrays, SamplesError, stored_array

ROWS = 1024
"""Samples that are held in memory at once where the source can be read in parts."""
FORMS = (
    "a dictionary or tuple of arrays, a torch or Hugging Face dataset, a DataFrame, an .npz or"
    " .parquet file, or a folder of such files"
)


class FieldsError(SamplesError):
    """Files lack a field, or have it otherwise. The text names what is wanted and nothing else of
    the files.
    """


def wanted_arrays(folder: Path, fields: Sequence[Field]) -> list[NDArray[Any]]:
    """Values of these fields in all files of a folder, loaded whole; other fields are passed over.

    Raises:
        FieldsError: A field is missing, or has another shape or type.
        SamplesError: A file cannot be read; the text names it.
    """
    fields_by_name = {each.name: each for each in fields}
    parts: dict[str, list[NDArray[Any]]] = {name: [] for name in fields_by_name}
    for batch in file_batches(folder, "data", wanted=fields_by_name.keys()):
        for name, field in fields_by_name.items():
            if name not in batch:
                raise FieldsError(f"field {name} is missing. Fix: add it to every file")
            array = stored_array("data", name, batch[name])
            array_field = Field(name, array.shape[1:], str(array.dtype))
            if array_field != field:
                raise FieldsError(
                    f"field {name} is {array_field.dtype}{list(array_field.shape)},"
                    " the program takes"
                    f" {field.dtype}{list(field.shape)}. Fix: convert it"
                )
            parts[name].append(array)
    return [np.concatenate(arrays) for arrays in parts.values()]


def file_batches(
    path: Path, part: str, wanted: Collection[str] | None = None
) -> Iterator[FieldArrays]:
    """Samples of a file, or of all files in a folder.

    Args:
        path: The file or folder.
        part: For messages.
        wanted: Fields that are read; None: all.

    Raises:
        SamplesError: A file is none of these, or cannot be read.
    """
    if path.is_dir():
        files = sorted(each for each in path.rglob("*") if each.suffix in {".npz", ".parquet"})
        if not files:
            raise SamplesError(f"{part}: {path} holds no .npz or .parquet file")
        for each in files:
            yield from file_batches(each, part, wanted)
    elif not path.is_file():
        raise SamplesError(f"{part}: there is no file or folder {path}")
    elif path.suffix == ".npz":
        yield from _of_npz(path, part, wanted)
    elif path.suffix == ".parquet":
        yield from _of_parquet(path, part, wanted)
    else:
        raise SamplesError(f"{part}: {path} is of no known kind. Fix: give {FORMS}")


def _of_npz(path: Path, part: str, wanted: Collection[str] | None) -> Iterator[FieldArrays]:
    """Arrays of an archive; objects, which numpy would unpickle, are refused."""
    arrays = {}
    try:
        with zipfile.ZipFile(path) as archive:
            for entry in archive.namelist():
                name = entry.removesuffix(".npy")
                if wanted is not None and name not in wanted:
                    continue
                with archive.open(entry) as file:
                    arrays[name] = np.lib.format.read_array(file, allow_pickle=False)
    except (OSError, ValueError, zipfile.BadZipFile) as error:
        raise SamplesError(f"{part}: {path} cannot be read: {error}") from error
    yield from array_batches(arrays, part) if arrays or wanted is None else iter([{}])


def _of_parquet(path: Path, part: str, wanted: Collection[str] | None) -> Iterator[FieldArrays]:
    try:
        from pyarrow import ArrowException, parquet

        from hypergpu.programs.parquet_columns import column_values
    except ModuleNotFoundError:
        raise SamplesError(f"{part}: {path} needs pyarrow. Fix: pip install pyarrow") from None
    try:
        with parquet.ParquetFile(path) as file:
            names = file.schema_arrow.names
            columns = [name for name in names if wanted is None or name in wanted]
            first = 0
            for batch in file.iter_batches(ROWS, columns=columns):
                yield {
                    name: column_values(column, f"{part}: {path}, column {name}", first)
                    for name, column in zip(batch.schema.names, batch.columns, strict=True)
                }
                first += batch.num_rows
    except (OSError, ArrowException) as error:
        raise SamplesError(f"{part}: {path} cannot be read: {error}") from error


def array_batches(arrays: Mapping[str, NDArray[Any]], part: str) -> Iterator[FieldArrays]:
    """Arrays by name as batches.

    Raises:
        SamplesError: Their lengths differ.
    """
    counts = {name: len(array) for name, array in arrays.items()}
    if len(set(counts.values())) != 1:
        raise SamplesError(f"{part}: arrays of unequal lengths: {counts}. Fix: one row a sample")
    for start in range(0, max(counts.values()), ROWS):
        yield {
            name: _stack_rows(array[start : start + ROWS], f"{part}, field {name}", start)
            for name, array in arrays.items()
        }


def _stack_rows(array: NDArray[Any], where: str, first: int) -> NDArray[Any]:
    """A column of lists as rows."""
    if array.dtype != object or any(isinstance(each, str | bytes) for each in array[:1]):
        return array
    return stacked_rows([*array], where, first)


def stacked_rows(rows: Sequence[Any], where: str, first: int) -> NDArray[Any]:
    """Rows of one shape as an array.

    Args:
        rows: Arrays, lists or numbers, one a sample.
        where: For messages.
        first: Number of the first sample.

    Raises:
        SamplesError: One is missing or has another shape.
    """
    arrays: list[NDArray[Any]] = []
    for number, row in enumerate(rows, first):
        if row is None or type(row).__name__ == "NAType":
            raise SamplesError(f"{where}: sample {number} has no value. Fix: drop or fill it")
        try:
            arrays.append(np.asarray(row))
        except ValueError:  # numpy's word for lists of unequal lengths
            raise SamplesError(
                f"{where}: sample {number} has rows of unequal lengths. Fix: pad them to one length"
            ) from None
        if arrays[-1].shape != arrays[0].shape:
            raise SamplesError(
                f"{where}: sample {number} has shape {list(arrays[-1].shape)}, sample {first}"
                f" {list(arrays[0].shape)}. Fix: pad samples to one shape"
            )
    return np.stack(arrays)

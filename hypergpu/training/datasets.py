"""A user's data in the forms that people have them, as batches of named arrays."""

import itertools
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeGuard

import numpy as np
from numpy.typing import NDArray

from hypergpu.programs.samples import Batch, SamplesError

_ROWS = 1024
"""Samples that are held in memory at once where the source can be read in parts."""
_HELD_OUT_EVERY = 10
FORMS = (
    "a dictionary or tuple of arrays, a torch or Hugging Face dataset, a DataFrame, an .npz or"
    " .parquet file, or a folder of such files"
)


class DataSource(NamedTuple):
    """Data that can be read from the start as often as wanted."""

    given: Any
    part: str
    """For messages: ``train`` or ``held_out``."""

    def batches(self) -> Iterator[Batch]:
        """All samples in order.

        Raises:
            SamplesError: The data have none of the forms that are known.
        """
        yield from _batches(self.given, self.part)

    @property
    def is_tuple(self) -> bool:
        """Whether a loss gets its batch as a tuple, as the data's own samples are."""
        first = next(iter(self.batches()), {})
        return bool(first) and all(name.startswith(_FIELD) for name in first)


_FIELD = "field_"


def without_held_out(batches: Iterable[Batch]) -> Iterator[Batch]:
    """All but each tenth sample."""
    return _of_ten(batches, is_tenth=False)


def only_held_out(batches: Iterable[Batch]) -> Iterator[Batch]:
    """Each tenth sample."""
    return _of_ten(batches, is_tenth=True)


def _of_ten(batches: Iterable[Batch], *, is_tenth: bool) -> Iterator[Batch]:
    first = 0
    for batch in batches:
        count = len(next(iter(batch.values())))
        tenth = np.arange(first, first + count) % _HELD_OUT_EVERY == _HELD_OUT_EVERY - 1
        chosen = tenth if is_tenth else ~tenth
        first += count
        if chosen.any():
            yield {name: array[chosen] for name, array in batch.items()}


def _batches(given: Any, part: str) -> Iterator[Batch]:
    if isinstance(given, str | Path):
        return _of_path(Path(given).expanduser(), part)
    if hasattr(given, "columns") and hasattr(given, "to_numpy"):  # a DataFrame
        return _of_arrays({str(name): given[name].to_numpy() for name in given.columns}, part)
    if isinstance(given, Mapping):
        return _of_arrays({str(name): _array(each) for name, each in given.items()}, part)
    if hasattr(given, "column_names") and hasattr(given, "__len__"):  # datasets.Dataset
        return _of_rows(given, part)
    if _is_arrays(given):
        arrays = {f"{_FIELD}{number}": _array(each) for number, each in enumerate(given)}
        return _of_arrays(arrays, part)
    return _of_iterable(given, part)


def _of_iterable(given: Any, part: str) -> Iterator[Batch]:
    if hasattr(given, "__getitem__") and hasattr(given, "__len__"):
        return _of_samples((given[number] for number in range(len(given))), part)
    if isinstance(given, Iterator):
        raise SamplesError(
            f"{part}: an iterator can be read only once. Fix: give a list of its samples"
        )
    if hasattr(given, "__iter__"):
        return _of_samples(iter(given), part)
    raise SamplesError(f"{part}: data of type {type(given).__name__}. Fix: give {FORMS}")


def _is_arrays(given: Any) -> TypeGuard[Sequence[Any]]:
    return isinstance(given, tuple | list) and bool(given) and all(map(_is_array, given))


def _is_array(value: Any) -> bool:
    return hasattr(value, "shape") and hasattr(value, "dtype") and bool(len(value.shape))


def _array(value: Any) -> NDArray[Any]:
    """A tensor, array or list as an array."""
    if hasattr(value, "detach"):
        value = value.detach().cpu()
    return np.asarray(value)


def _of_arrays(arrays: Mapping[str, NDArray[Any]], part: str) -> Iterator[Batch]:
    counts = {name: len(array) for name, array in arrays.items()}
    if len(set(counts.values())) != 1:
        raise SamplesError(f"{part}: arrays of unequal lengths: {counts}. Fix: one row a sample")
    for start in range(0, max(counts.values()), _ROWS):
        yield {name: _stack_rows(array[start : start + _ROWS]) for name, array in arrays.items()}


def _stack_rows(array: NDArray[Any]) -> NDArray[Any]:
    """A column of lists as rows."""
    return np.stack([np.asarray(each) for each in array]) if array.dtype == object else array


def _of_rows(given: Any, part: str) -> Iterator[Batch]:
    for start in range(0, len(given), _ROWS):
        rows = given[start : start + _ROWS]
        yield _with_context(part, start, {name: [*rows[name]] for name in given.column_names})


def _of_samples(samples: Iterator[Any], part: str) -> Iterator[Batch]:
    first = 0
    while taken := list(itertools.islice(samples, _ROWS)):
        named = [_name_fields(sample) for sample in taken]
        columns = {name: [sample[name] for sample in named] for name in named[0]}
        yield _with_context(part, first, columns)
        first += len(taken)


def _name_fields(sample: Any) -> Mapping[str, Any]:
    if isinstance(sample, Mapping):
        return {str(name): value for name, value in sample.items()}
    values = sample if isinstance(sample, tuple | list) else (sample,)
    return {f"{_FIELD}{number}": value for number, value in enumerate(values)}


def _with_context(part: str, first: int, columns: Mapping[str, list[Any]]) -> Batch:
    found = {}
    for name, values in columns.items():
        try:
            found[name] = np.stack([_array(each) for each in values])
        except ValueError as wrong:
            raise SamplesError(
                f"{part}, from sample {first} on, field {name}: {wrong}."
                " Fix: pad or resize samples to one shape"
            ) from wrong
    return found


def _of_path(path: Path, part: str) -> Iterator[Batch]:
    if path.is_dir():
        files = sorted(each for each in path.rglob("*") if each.suffix in {".npz", ".parquet"})
        if not files:
            raise SamplesError(f"{part}: {path} holds no .npz or .parquet file")
        for each in files:
            yield from _of_path(each, part)
    elif not path.is_file():
        raise SamplesError(f"{part}: there is no file or folder {path}")
    elif path.suffix == ".npz":
        yield from _of_npz(path, part)
    elif path.suffix == ".parquet":
        yield from _of_parquet(path, part)
    else:
        raise SamplesError(f"{part}: {path} is of no known kind. Fix: give {FORMS}")


def _of_npz(path: Path, part: str) -> Iterator[Batch]:
    """Arrays of an archive; objects, which numpy would unpickle, are refused."""
    arrays = {}
    try:
        with zipfile.ZipFile(path) as archive:
            for name in archive.namelist():
                with archive.open(name) as file:
                    array = np.lib.format.read_array(file, allow_pickle=False)
                    arrays[name.removesuffix(".npy")] = array
    except (OSError, ValueError, zipfile.BadZipFile) as broken:
        raise SamplesError(f"{part}: {path} cannot be read: {broken}") from broken
    yield from _of_arrays(arrays, part)


def _of_parquet(path: Path, part: str) -> Iterator[Batch]:
    try:
        from pyarrow import ArrowException, parquet
    except ModuleNotFoundError:
        raise SamplesError(f"{part}: {path} needs pyarrow. Fix: pip install pyarrow") from None
    try:
        with parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(_ROWS):
                yield {
                    name: _stack_rows(column.to_numpy(zero_copy_only=False))
                    for name, column in zip(batch.schema.names, batch.columns, strict=True)
                }
    except (OSError, ArrowException) as broken:
        raise SamplesError(f"{part}: {path} cannot be read: {broken}") from broken

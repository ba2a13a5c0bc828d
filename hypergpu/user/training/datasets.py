"""A user's data in the forms that people have them, as batches of named arrays."""

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeGuard

import numpy as np
from numpy.typing import NDArray

from hypergpu.programs.sample_files import FORMS, ROWS, array_batches, file_batches, stacked_rows
from hypergpu.programs.samples import FieldArrays, SamplesError
from hypergpu.workloads.held_out import EVERY, held_out_places
from hypergpu.workloads.splits import SplitFiles, split_files, split_of


class SplitPart(NamedTuple):
    """Files of one part of a folder."""

    paths: tuple[Path, ...]


class DataSource(NamedTuple):
    """Data that can be read from the start as often as wanted."""

    given: Any
    part: str
    """For messages: ``train`` or ``held_out``."""

    def batches(self) -> Iterator[FieldArrays]:
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


class HeldOutSplit(NamedTuple):
    """Which samples of a user's data are held out, where nobody has set some apart."""

    places: NDArray[np.bool_]

    @classmethod
    def draw(cls, batches: Iterable[FieldArrays], label: str = "") -> "HeldOutSplit":
        """Draw a tenth of the samples, of each class where one field says it.

        Reads all samples once.

        Args:
            batches: All samples in order.
            label: The field with a sample's class; empty: the only one with a whole number.
        """
        labels: list[int] = []
        count = 0
        for batch in batches:
            count += len(next(iter(batch.values())))
            labels += _class_numbers(batch, label)
        places = held_out_places(labels if len(labels) == count else [0] * count)
        if sum(places) * 2 * EVERY < count:  # Nearly each sample is a class of its own.
            places = held_out_places([0] * count)
        return cls(np.array(places, bool))

    def train(self, batches: Iterable[FieldArrays]) -> Iterator[FieldArrays]:
        """All samples but the held-out ones."""
        return _select(batches, ~self.places)

    def held_out(self, batches: Iterable[FieldArrays]) -> Iterator[FieldArrays]:
        """The held-out samples."""
        return _select(batches, self.places)


def _class_numbers(batch: FieldArrays, label: str) -> list[int]:
    whole = [
        name
        for name, array in batch.items()
        if array.ndim == 1 and array.dtype.kind in "iub" and (not label or name == label)
    ]
    return batch[whole[0]].tolist() if len(whole) == 1 else []


def _select(batches: Iterable[FieldArrays], is_chosen: NDArray[np.bool_]) -> Iterator[FieldArrays]:
    first = 0
    for batch in batches:
        count = len(next(iter(batch.values())))
        chosen_rows = is_chosen[first : first + count]
        first += count
        if chosen_rows.any():
            yield {name: array[chosen_rows] for name, array in batch.items()}


def folder_split(given: Any) -> SplitFiles | None:
    """Files to train on and to hold out of a folder whose files name such parts; None: it names
    none, or the data are no folder.
    """
    if not isinstance(given, str | Path) or not (folder := Path(given).expanduser()).is_dir():
        return None
    paths = sorted(path for path in folder.rglob("*") if path.suffix in {".npz", ".parquet"})
    files = split_files(paths, lambda path: split_of(path.relative_to(folder)))
    return files if files.train and files.held_out else None


def _batches(given: Any, part: str) -> Iterator[FieldArrays]:
    if isinstance(given, SplitPart):
        return itertools.chain.from_iterable(file_batches(path, part) for path in given.paths)
    if isinstance(given, str | Path):
        return file_batches(Path(given).expanduser(), part)
    return _of_object(given, part)


def _of_object(given: Any, part: str) -> Iterator[FieldArrays]:
    if hasattr(given, "batch_sampler") and hasattr(given, "dataset"):
        raise SamplesError(
            f"{part}: a {type(given).__name__} gives batches, and nodes make their own."
            f" Fix: give its samples: {'data' if part == 'data' else part}=loader.dataset"
        )
    if hasattr(given, "columns") and hasattr(given, "to_numpy"):  # a DataFrame
        columns = {str(name): _column(given[name], part) for name in given.columns}
        return array_batches(columns, part)
    if isinstance(given, Mapping):
        fields = {str(name): _field(each, f"{part}, field {name}") for name, each in given.items()}
        return array_batches(fields, part)
    if hasattr(given, "column_names") and hasattr(given, "__len__"):  # datasets.Dataset
        return _of_rows(given, part)
    if _is_arrays(given):
        arrays = {f"{_FIELD}{number}": _array(each) for number, each in enumerate(given)}
        return array_batches(arrays, part)
    if isinstance(given, list) and _is_transposed(given):
        raise SamplesError(
            f"{part}: a list is one of samples, and these {len(given)} arrays have unequal shapes."
            " Fix: give a tuple of them, one for each field"
        )
    return _of_iterable(given, part)


def _of_iterable(given: Any, part: str) -> Iterator[FieldArrays]:
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
    return isinstance(given, tuple) and bool(given) and all(map(_is_array, given))


def _is_transposed(given: Sequence[Any]) -> bool:
    """Whether arrays are fields of as many samples, and cannot be samples themselves."""
    if len(given) < 2 or not all(map(_is_array, given)):
        return False
    shapes = [tuple(each.shape) for each in given]
    return len(set(shapes)) > 1 and len({shape[0] for shape in shapes}) == 1


def _is_array(value: Any) -> bool:
    return hasattr(value, "shape") and hasattr(value, "dtype") and bool(len(value.shape))


def _array(value: Any) -> NDArray[Any]:
    """A tensor, array or list as an array."""
    if hasattr(value, "detach"):
        value = value.detach().cpu()
        value = value.float() if str(value.dtype) == "torch.bfloat16" else value
    return np.asarray(value)


def _field(value: Any, where: str) -> NDArray[Any]:
    """The values of all samples."""
    if isinstance(value, list | tuple):
        rows = [_array(each) if hasattr(each, "dtype") else each for each in value]
        return stacked_rows(rows, where, 0)
    return _array(value)


def _column(series: Any, part: str) -> NDArray[Any]:
    """A column of a DataFrame. One that pandas calls nullable has a type of numpy if none is."""
    find_missing = getattr(series, "isna", None) or getattr(series, "is_null", None)
    plain = getattr(getattr(series, "dtype", None), "numpy_dtype", None)
    values: NDArray[Any] = series.to_numpy()
    is_nullable = plain is not None or values.dtype == object or hasattr(series, "is_null")
    if is_nullable and find_missing is not None:
        missing_places = np.flatnonzero(np.asarray(find_missing()))
        if len(missing_places):
            raise SamplesError(
                f"{part}, field {series.name}: sample {missing_places[0]} has no value."
                " Fix: drop or fill it"
            )
    return values if plain is None else series.to_numpy(dtype=plain)


def _of_rows(given: Any, part: str) -> Iterator[FieldArrays]:
    for start in range(0, len(given), ROWS):
        rows = given[start : start + ROWS]
        yield _with_context(part, start, {name: [*rows[name]] for name in given.column_names})


def _of_samples(samples: Iterator[Any], part: str) -> Iterator[FieldArrays]:
    first = 0
    while chunk := list(itertools.islice(samples, ROWS)):
        named_samples = [_name_fields(sample) for sample in chunk]
        columns = {name: [sample[name] for sample in named_samples] for name in named_samples[0]}
        yield _with_context(part, first, columns)
        first += len(chunk)


def _name_fields(sample: Any) -> Mapping[str, Any]:
    if isinstance(sample, Mapping):
        return {str(name): value for name, value in sample.items()}
    is_fields = isinstance(sample, tuple) or (isinstance(sample, list) and not _is_numbers(sample))
    values = sample if is_fields else (sample,)
    return {f"{_FIELD}{number}": value for number, value in enumerate(values)}


def _is_numbers(value: Any) -> bool:
    """Whether a list is one array: numbers alone, or such lists."""
    if isinstance(value, list):
        return all(map(_is_numbers, value))
    return isinstance(value, bool | int | float | np.number)


def _with_context(part: str, first: int, columns: Mapping[str, list[Any]]) -> FieldArrays:
    return {
        name: stacked_rows(
            [
                _array(each) if _is_array(each) or hasattr(each, "detach") else each
                for each in values
            ],
            f"{part}, field {name}",
            first,
        )
        for name, values in columns.items()
    }

"""A user's data in the forms that people have them, as batches of named arrays."""

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeGuard

import numpy as np
from numpy.typing import NDArray

from hypergpu.programs.sample_files import FORMS, ROWS, array_batches, file_batches
from hypergpu.programs.samples import Batch, SamplesError
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


class HeldOutSplit(NamedTuple):
    """Which samples of a user's data are held out, where nobody has set some apart."""

    places: NDArray[np.bool_]

    @classmethod
    def draw(cls, batches: Iterable[Batch], label: str = "") -> "HeldOutSplit":
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

    def train(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """All samples but the held-out ones."""
        return _select(batches, ~self.places)

    def held_out(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """The held-out samples."""
        return _select(batches, self.places)


def _class_numbers(batch: Batch, label: str) -> list[int]:
    whole = [
        name
        for name, array in batch.items()
        if array.ndim == 1 and array.dtype.kind in "iub" and (not label or name == label)
    ]
    return batch[whole[0]].tolist() if len(whole) == 1 else []


def _select(batches: Iterable[Batch], is_chosen: NDArray[np.bool_]) -> Iterator[Batch]:
    first = 0
    for batch in batches:
        count = len(next(iter(batch.values())))
        chosen = is_chosen[first : first + count]
        first += count
        if chosen.any():
            yield {name: array[chosen] for name, array in batch.items()}


def folder_split(given: Any) -> SplitFiles | None:
    """Files to train on and to hold out of a folder whose files name such parts; None: it names
    none, or the data are no folder.
    """
    if not isinstance(given, str | Path) or not (folder := Path(given).expanduser()).is_dir():
        return None
    paths = sorted(path for path in folder.rglob("*") if path.suffix in {".npz", ".parquet"})
    found = split_files(paths, lambda path: split_of(path.relative_to(folder)))
    return found if found.train and found.held_out else None


def _batches(given: Any, part: str) -> Iterator[Batch]:
    if isinstance(given, SplitPart):
        return itertools.chain.from_iterable(file_batches(path, part) for path in given.paths)
    if isinstance(given, str | Path):
        return file_batches(Path(given).expanduser(), part)
    if hasattr(given, "columns") and hasattr(given, "to_numpy"):  # a DataFrame
        return array_batches({str(name): given[name].to_numpy() for name in given.columns}, part)
    if isinstance(given, Mapping):
        return array_batches({str(name): _array(each) for name, each in given.items()}, part)
    if hasattr(given, "column_names") and hasattr(given, "__len__"):  # datasets.Dataset
        return _of_rows(given, part)
    if _is_arrays(given):
        arrays = {f"{_FIELD}{number}": _array(each) for number, each in enumerate(given)}
        return array_batches(arrays, part)
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


def _of_rows(given: Any, part: str) -> Iterator[Batch]:
    for start in range(0, len(given), ROWS):
        rows = given[start : start + ROWS]
        yield _with_context(part, start, {name: [*rows[name]] for name in given.column_names})


def _of_samples(samples: Iterator[Any], part: str) -> Iterator[Batch]:
    first = 0
    while taken := list(itertools.islice(samples, ROWS)):
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

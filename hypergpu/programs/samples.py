"""Files of a job's samples: for each field the raw values of all samples, one after the other.

Nothing is loaded whole: writers append, readers map the files into memory.
"""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from hypergpu.programs.container import FIELDS_MOST, Field

INDEX_PATH = "data/fields.json"
PARTS = ("train", "held_out")
"""Where training samples stay on nodes there is no ``train``."""
FieldArrays = Mapping[str, NDArray[Any]]
"""Arrays by field; the first dimension counts samples."""
NUMPY_DTYPES = ("float32", "float16", "int64", "int32", "int16", "int8", "uint8", "bool")
"""What fields are stored as."""
_WHOLE_NUMBERS = ("int64", "int32", "int16", "int8", "uint8")
_SAMPLES_MOST = 1 << 40


class SamplesError(ValueError):
    """Samples that cannot be used. The text says which, what is wrong and the fix."""


class SampleIndex(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the files hold."""

    fields: tuple[Field, ...]
    counts: dict[str, int]
    """Samples of each part."""


def sample_path(folder: Path, part: str, number: int) -> Path:
    """File of one field, by its number."""
    return folder / "data" / f"{part}-{number:02d}.bin"


class SampleWriter:
    """Writes samples into a folder, batch after batch."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._fields: tuple[Field, ...] = ()
        self._counts: dict[str, int] = {}

    def write_part(self, part: str, batches: Iterable[FieldArrays]) -> tuple[Field, ...]:
        """Write all samples of a part and return their fields.

        Raises:
            SamplesError: There is none, or two batches differ in names, shapes or types.
        """
        (self._folder / "data").mkdir(parents=True, exist_ok=True)
        count = 0
        for batch in batches:
            count += self._append(part, count, batch)
        if not count:
            raise SamplesError(f"{part}: there are no samples")
        self._counts[part] = count
        return self._fields

    def close(self) -> None:
        """Write the index."""
        index = SampleIndex(self._fields, self._counts)
        (self._folder / INDEX_PATH).write_bytes(msgspec.json.encode(index))

    def _append(self, part: str, first: int, batch: FieldArrays) -> int:
        arrays = {name: stored_array(part, name, array) for name, array in batch.items()}
        fields = tuple(
            Field(name, array.shape[1:], str(array.dtype)) for name, array in arrays.items()
        )
        if len(fields) > FIELDS_MOST:
            raise SamplesError(f"{part}: {len(fields)} fields; at most {FIELDS_MOST} are possible")
        self._fields = self._fields or fields
        if fields != self._fields:
            raise SamplesError(
                f"{part}, sample {first}: its fields are {_fields_text(fields)}, those before"
                f" {_fields_text(self._fields)}. Fix: pad or resize samples to one shape"
            )
        counts = {len(array) for array in arrays.values()}
        if len(counts) != 1:
            raise SamplesError(
                f"{part}: its fields have {sorted(counts)} samples, not as many each"
            )
        for number, array in enumerate(arrays.values()):
            with sample_path(self._folder, part, number).open("ab") as file:
                array.tofile(file)
        return counts.pop()


def stored_array(part: str, name: str, array: NDArray[Any]) -> NDArray[Any]:
    """A field as it is stored: float64 as float32, everything else as it is.

    Raises:
        SamplesError: Values of this type are no numbers.
    """
    if array.dtype == np.float64:
        array = array.astype(np.float32)
    if array.dtype.newbyteorder("=").name not in NUMPY_DTYPES or not array.ndim:
        what, fix = _unusable(array)
        raise SamplesError(f"{part}, field {name}: {what} cannot be trained on. Fix: {fix}")
    return np.ascontiguousarray(array, array.dtype.newbyteorder("<"))


def _unusable(array: NDArray[Any]) -> tuple[str, str]:
    """What an array holds that is no number of a program, and the fix."""
    if not array.ndim:
        return "one value for all samples", "give an array with one row a sample"
    if array.dtype.kind == "c":
        return f"{array.dtype}", "give real and imaginary parts: numpy.stack([x.real, x.imag], -1)"
    if array.dtype.kind in "US" or (array.dtype == object and _is_text(array)):
        return "text", "give whole numbers, as a tokenizer makes them"
    if array.dtype.kind in "mM":
        return "times", "give numbers, such as x.astype('int64')"
    if array.dtype == object:
        return "Python objects", "give an array of numbers with one shape for each sample"
    return f"{array.dtype}", f"convert it to one of {', '.join(NUMPY_DTYPES)}"


def _is_text(array: NDArray[Any]) -> bool:
    return any(isinstance(each, str | bytes) for each in array.flat[:8])


def _fields_text(fields: Iterable[Field]) -> str:
    return ", ".join(f"{each.name} {each.dtype}{list(each.shape)}" for each in fields)


def label_field(fields: Sequence[Field], name: str = "") -> int | None:
    """Number of the field that says a sample's class; None: there is none, or no telling which.

    Args:
        fields: Those of the samples.
        name: The field's; empty: the only one that holds a whole number for each sample.

    Raises:
        SamplesError: There is no such field, or it holds something else.
    """
    whole = [
        number
        for number, each in enumerate(fields)
        if not each.shape and each.dtype in _WHOLE_NUMBERS
    ]
    if not name:
        return whole[0] if len(whole) == 1 else None
    for number in whole:
        if fields[number].name == name:
            return number
    field_names = ", ".join(fields[number].name for number in whole) or "none"
    raise SamplesError(
        f"{name!r} is no field with a whole number for each sample; such fields: {field_names}"
    )


class StoredSamples:
    """Samples of one part, mapped into memory."""

    def __init__(self, folder: Path, part: str, index: SampleIndex, label: str = "") -> None:
        self.count = index.counts[part]
        self._arrays = [
            _map_file(sample_path(folder, part, number), field, self.count)
            for number, field in enumerate(index.fields)
        ]
        number = label_field(index.fields, label)
        self.has_labels = number is not None
        """Whether a field says a sample's class; else all have the class 0."""
        self.labels: NDArray[np.int64] = (
            np.zeros(self.count, np.int64)
            if number is None
            else self._arrays[number].astype(np.int64, copy=False)
        )

    def batch(self, indices: NDArray[np.int64]) -> tuple[NDArray[Any], ...]:
        """Values of each field, in the order of ``indices``."""
        return tuple(array[indices] for array in self._arrays)


class JobFiles(NamedTuple):
    """The samples of a job's data folder."""

    fields: tuple[Field, ...]
    train: StoredSamples | None
    """None: they stay on the nodes that have them."""
    held_out: StoredSamples


def read_samples(folder: Path, label: str = "") -> JobFiles:
    """Fields, training samples and held-out samples of a job's data folder.

    Args:
        folder: The job's.
        label: Field that says a sample's class, see `label_field`.

    Raises:
        SamplesError: There are none, or their files are not what the index says.
    """
    try:
        content = (folder / INDEX_PATH).read_bytes()
        index = msgspec.json.decode(content, type=SampleIndex)
    except (OSError, msgspec.DecodeError, RecursionError, UnicodeError) as error:
        raise SamplesError(f"{INDEX_PATH} cannot be read: {error}") from error
    if not {"held_out"} <= set(index.counts) <= set(PARTS) or not (
        0 < len(index.fields) <= FIELDS_MOST
    ):
        raise SamplesError(f"{INDEX_PATH} must count samples of {' and '.join(PARTS)}")
    if not all(0 < count <= _SAMPLES_MOST for count in index.counts.values()):
        raise SamplesError(f"{INDEX_PATH}: each part has at least one sample")
    parts = {part: StoredSamples(folder, part, index, label) for part in index.counts}
    return JobFiles(index.fields, parts.get("train"), parts["held_out"])


def _map_file(path: Path, field: Field, count: int) -> NDArray[Any]:
    if field.dtype not in NUMPY_DTYPES or len(field.shape) > 16 or min(field.shape, default=1) < 1:
        raise SamplesError(
            f"field {field.name[:60]}: no samples can be of {field.dtype[:20]}"
            f" and shape {list(field.shape)[:16]}"
        )
    dtype = np.dtype(field.dtype)
    size = count * dtype.itemsize
    for each in field.shape:
        size *= each
    try:
        file_bytes = path.stat().st_size
    except OSError as error:
        raise SamplesError(f"{path.name} cannot be read: {error.strerror}") from error
    if file_bytes != size:
        raise SamplesError(f"{path.name} has {file_bytes} bytes; {count} samples need {size}")
    return np.memmap(path, dtype, "r", shape=(count, *field.shape))

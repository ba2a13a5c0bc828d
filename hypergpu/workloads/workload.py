"""Protocols of what builders return, the registry that builds them by name, and the workloads
that need no torch. Worker and evaluator know workloads only through them.

1,797 handwritten digits, carried inside the package so that they are there offline and without
scikit-learn.

The records are the test part of "Optical Recognition of Handwritten Digits" (E. Alpaydin and C.
Kaynak, UCI Machine Learning Repository, 1998, doi:10.24432/C50P49, CC BY 4.0), the set that
scikit-learn ships: 64 grey values of 0 to 16, then the digit, a byte each.
"""

import gzip
import importlib
import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from importlib.resources import files
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from hypergpu.dataset import permutation
from hypergpu.tensors.layout import Flat, Layout, TensorSpec, layout_of, pack
from hypergpu.workloads.entry import (
    BUILT_IN,
    Options,
    WorkloadEntry,
    complete_options,
    missing_modules,
)
from hypergpu.workloads.installed import workload_points

Array = NDArray[Any]
Parameters = Mapping[str, NDArray[np.float32]]


class DatasetError(ValueError):
    """The data cannot be used. The text names the folder or file, what is wrong and the fix."""


class NodeDataError(DatasetError):
    """A node's own data cannot be used. The text leaves the node: it names what the job asks for,
    and of the data no more than counts, shapes and types.
    """


class Samples(Protocol):
    """Labelled samples, in an order that is the same on every machine."""

    @property
    def labels(self) -> NDArray[np.int64]:
        """``int64[n]``: what label skew divides by."""

    def batch(self, indices: NDArray[np.int64]) -> tuple[Array, ...]:
        """Inputs and targets of the samples, in the order of ``indices``; a program's samples have
        as many arrays as it has fields.
        """


def all_finite(samples: Samples, batches: Iterable[NDArray[np.int64]]) -> bool:
    """Whether no input or target of the samples is infinite or not a number. Loads all of them."""
    arrays = (array for indices in batches for array in samples.batch(indices))
    return all(
        bool(np.isfinite(array).all()) for array in arrays if np.issubdtype(array.dtype, np.inexact)
    )


class ArraySamples(NamedTuple):
    """Samples that fit in memory."""

    inputs: Array  # [n, ...]
    targets: Array  # [n, ...]
    labels: NDArray[np.int64]  # [n]

    def batch(self, indices: NDArray[np.int64]) -> tuple[Array, Array]:
        """See `Samples`."""
        return self.inputs[indices], self.targets[indices]


class Dataset(NamedTuple):
    """Training samples and held-out samples."""

    train: Samples
    test: Samples
    class_names: tuple[str, ...] = ()
    """Names of the classes in the order of their numbers, for people; empty: numbers are shown."""


class Sums(NamedTuple):
    """An evaluation, added up over samples (or tokens) so that batches of any size combine."""

    loss: float
    score: float
    samples: int
    """Or tokens."""
    metrics: Mapping[str, float] = MappingProxyType({})
    """Metrics by name, where a workload has several; the score is the first of them."""

    def plus(self, other: "Sums") -> "Sums":
        """Both together."""
        metrics = {
            name: self.metrics.get(name, 0.0) + other.metrics.get(name, 0.0)
            for name in {**self.metrics, **other.metrics}
        }
        loss, score = self.loss + other.loss, self.score + other.score
        return Sums(loss, score, self.samples + other.samples, metrics)

    def metric(self, name: str) -> float:
        """The value of a metric by its name: ``loss``, ``perplexity``, one of `metrics`, or the
        mean score under any other.
        """
        if name == "loss":
            return self.loss / self.samples
        if name == "perplexity" and name not in self.metrics:
            return math.exp(min(self.loss / self.samples, 700.0))
        return self.metrics.get(name, self.score) / self.samples


class Workload(Protocol):
    """A dataset and something that learns it."""

    def load(self, data_dir: str) -> Dataset:
        """Read the data. Raises `DatasetError`.

        Args:
            data_dir: The user's folder, or "" for the workload's own data.
        """


NO_SAMPLES = ArraySamples(np.empty((0, 0)), np.empty((0, 0)), np.zeros(0, dtype=np.int64))
"""Training samples as the evaluator sees them where they stay on nodes."""


@runtime_checkable
class JobWorkload(Protocol):
    """What a builder returns where the model too depends on a job's data."""

    def for_job(self, data_dir: str) -> Workload:
        """The workload of the job whose data are in the folder. Raises `DatasetError`."""


class Example(NamedTuple):
    """A held-out sample for people; what it is not stays at its default."""

    text: str = ""
    image: Array | None = None
    """``uint8[height, width]``, or ``uint8[height, width, 3]``."""
    label: int | str = ""
    """The right answer: a class number, or text."""


@runtime_checkable
class MeasuredWorkload(Protocol):
    """Optional part of a workload: a metric of its own, in place of its entry's."""

    @property
    def metric(self) -> str:
        """Its name; `hypergpu.workloads.metrics` says which names fall as a model learns."""


@runtime_checkable
class NotedWorkload(Protocol):
    """Optional part of a workload: what its user should know of its data and model."""

    @property
    def notes(self) -> tuple[str, ...]:
        """Sentences, once the data are read: what was left out, and what is done otherwise."""


@runtime_checkable
class CheckedWorkload(Protocol):
    """Optional part of a workload: its data are checked where they are sent from."""

    def check(self, data_dir: str, *, has_train: bool) -> None:
        """Check a job's folder without its weights. Raises `DatasetError`.

        Args:
            data_dir: The folder.
            has_train: Whether training samples are in it, rather than on nodes.
        """


@runtime_checkable
class OperatorWorkload(Protocol):
    """Optional part of a workload: operators of torch without which no node can train it."""

    @property
    def operators(self) -> tuple[str, ...]:
        """Their names, as programs have them."""


@runtime_checkable
class VersionedWorkload(Protocol):
    """Optional part of a workload: a version of its own, where its entry trains several."""

    @property
    def version(self) -> int:
        """The least version of the entry that trains it."""


@runtime_checkable
class LargeSamplesWorkload(Protocol):
    """Optional part of a workload: samples so large that fewer are evaluated at once."""

    @property
    def evaluation_batch(self) -> int:
        """Samples that an evaluation puts through the model at once."""

    @property
    def gradient_samples_most(self) -> int:
        """Held-out samples that the gradient which weighs updates is measured on."""


@runtime_checkable
class ExampleWorkload(Protocol):
    """Optional part of a workload: what its model makes of a few held-out samples.

    Both are called with the same samples, eight at most, and may use fewer of them. They are pure:
    random draws come from a generator of their own with a fixed seed.
    """

    def examples(self, inputs: Array, targets: Array) -> Sequence[Example]:
        """Stored samples for people; none where the samples cannot be shown."""

    def outputs(self, model: Any, inputs: Any) -> Sequence[int | str]:
        """Class number or text for each of the examples, in their order.

        Args:
            model: As in ``evaluate``: a torch module in evaluation mode, or named arrays.
            inputs: As in ``evaluate``: a tensor on the module's device, or an array.
        """


class NumpyWorkload(Workload, Protocol):
    """A model whose gradient is written by hand. Its tensors are all float32 parameters."""

    def initial(self, seed: int) -> dict[str, NDArray[np.float32]]:
        """Initial parameters by name; the same for the same seed."""

    def gradient(
        self, parameters: Parameters, inputs: Array, targets: Array
    ) -> tuple[float, dict[str, NDArray[np.float32]]]:
        """Mean loss over the batch and its gradient, by name."""

    def evaluate(self, parameters: Parameters, inputs: Array, targets: Array) -> Sums:
        """Loss and score over the batch."""


def numpy_layout(workload: NumpyWorkload) -> Layout:
    """The layout that node and coordinator derive alike."""
    tensors = workload.initial(0)
    return layout_of(TensorSpec(name, array.shape) for name, array in tensors.items())


def numpy_initial(workload: NumpyWorkload, seed: int) -> Flat:
    """The first model of a job with this seed, as node and coordinator draw it alike."""
    layout, tensors = numpy_layout(workload), workload.initial(seed)
    if len(tensors) == 1:  # It is the model, which is not copied: it may be most of the memory.
        only = np.asarray(next(iter(tensors.values())), np.float32)
        return Flat.empty(layout_of(()))._replace(parameters=only.reshape(-1))
    flat = Flat.empty(layout)
    pack(layout, tensors, flat)
    return flat


class UnknownWorkloadError(LookupError):
    """No entry has the name. The text lists those there are."""


class BuilderMissingError(RuntimeError):
    """The builder cannot be imported. ``module`` is what is missing, such as ``torch``."""

    def __init__(self, entry: WorkloadEntry, module: str) -> None:
        fix = f". Fix: pip install '{entry.install}'" if entry.install else ""
        super().__init__(
            f"workload {entry.name} needs the Python module {module}, which is not installed{fix}"
        )
        self.module = module


@cache
def _entries_of_packages() -> tuple[tuple[WorkloadEntry, ...], tuple[str, ...]]:
    """Entries of other packages, and why any of them are left out."""
    found: list[WorkloadEntry] = []
    complaints: list[str] = []
    taken = {entry.name for entry in BUILT_IN}
    for point in sorted(workload_points(), key=lambda point: (point.name, point.value)):
        where = f"entry point {point.name} = {point.value}"
        try:
            entry = point.load()
        except Exception as error:  # noqa: BLE001 - another package's import may fail in any way
            complaints.append(f"{where} cannot be imported: {error!r}")
            continue
        if not isinstance(entry, WorkloadEntry) or entry.name != point.name:
            complaints.append(
                f"{where} must be a hypergpu.workloads.entry.WorkloadEntry named {point.name}"
            )
        elif entry.name in taken:
            complaints.append(f"{where} is left out: the name is taken")
        else:
            taken.add(entry.name)
            found.append(entry)
    return tuple(found), tuple(complaints)


def read_entries_again() -> None:
    """Forget the entries of other packages, which may have changed on disk. Not for a process that
    builds workloads: their modules would be of two versions.
    """
    for point in workload_points():
        package = point.module.partition(".")[0]
        for name in [name for name in sys.modules if name.partition(".")[0] == package]:
            del sys.modules[name]
    importlib.invalidate_caches()
    _entries_of_packages.cache_clear()


def entries() -> tuple[WorkloadEntry, ...]:
    """Every entry there is, built-in ones first."""
    return BUILT_IN + _entries_of_packages()[0]


def complaints() -> tuple[str, ...]:
    """Return complaints about entry points of other packages, for `hypergpu env` and logs."""
    return _entries_of_packages()[1]


def find(name: str) -> WorkloadEntry:
    """The entry with the name.

    Raises:
        UnknownWorkloadError: There is none.
    """
    for entry in entries():
        if entry.name == name:
            return entry
    names = ", ".join(entry.name for entry in entries())
    raise UnknownWorkloadError(f"there is no workload {name!r}; there are: {names}")


def build(
    entry: WorkloadEntry, options: Options
) -> Any:  # Any: the entry's kind says which protocol
    """The workload, built by importing what the entry names.

    Raises:
        OptionError: The options do not fit the entry.
        BuilderMissingError: A Python module is not installed.
    """
    complete = complete_options(entry, options)
    for missing_name in missing_modules(entry):
        raise BuilderMissingError(entry, missing_name)
    module, _, name = entry.builder.partition(":")
    try:
        builder = getattr(importlib.import_module(module), name)
    except ModuleNotFoundError as missing:
        raise BuilderMissingError(entry, missing.name or module) from missing
    return builder(complete)


def build_for_job(entry: WorkloadEntry, options: Options, data_dir: str) -> Any:
    """The workload of a job with this data folder; raises what `build` does, and `DatasetError`."""
    built = build(entry, options)
    return built.for_job(data_dir) if isinstance(built, JobWorkload) else built


CLASSES = 10
PIXELS = 64
_SPLIT_SEED = 20_261_120
_TEST_SHARE = 5  # one in five


def digits() -> Dataset:
    """Digits as ``float32[n, 64]`` in [0, 1] with ``int64[n]`` targets.

    The held-out fifth has the same share of each digit, and is the same for every job.
    """
    packed = gzip.decompress(files("hypergpu.workloads").joinpath("digits.u8.gz").read_bytes())
    records = np.frombuffer(packed, dtype=np.uint8).reshape(-1, PIXELS + 1)
    inputs = records[:, :PIXELS].astype(np.float32) / np.float32(16)
    labels = records[:, PIXELS].astype(np.int64)
    is_test = np.zeros(len(labels), dtype=bool)
    for digit in range(CLASSES):
        members = np.flatnonzero(labels == digit)
        order = permutation(_SPLIT_SEED, digit, 0, len(members))
        is_test[members[order[: len(members) // _TEST_SHARE]]] = True
    train, test = (
        ArraySamples(inputs[part], labels[part], labels[part]) for part in (~is_test, is_test)
    )
    return Dataset(train, test)


def labelled_images(images: Array, labels: Array) -> list[Example]:
    """Images with their class numbers as examples."""
    return [
        Example(image=image, label=int(label)) for image, label in zip(images, labels, strict=True)
    ]


def draw_digits(inputs: Array) -> Array:
    """Digits as images, ``uint8[b, 8, 8]``."""
    drawn: Array = (inputs.reshape(-1, 8, 8) * 255).astype(np.uint8)
    return drawn


class DigitsSoftmax:
    """Logits are a linear function of the 64 grey values. Implements `NumpyWorkload`."""

    def load(self, data_dir: str) -> Dataset:
        """The built-in digits."""
        return digits()

    def initial(self, seed: int) -> dict[str, NDArray[np.float32]]:
        """Zeros, whatever the seed: the loss is convex."""
        return {
            "bias": np.zeros(CLASSES, dtype=np.float32),
            "weight": np.zeros((PIXELS, CLASSES), dtype=np.float32),
        }

    def gradient(
        self, parameters: Parameters, inputs: Array, targets: Array
    ) -> tuple[float, dict[str, NDArray[np.float32]]]:
        """Mean cross-entropy and its gradient."""
        logs = _log_softmax(parameters, inputs)  # [b, classes]
        rows = np.arange(len(targets))
        loss = -float(logs[rows, targets].mean())
        slope = np.exp(logs)
        slope[rows, targets] -= np.float32(1)
        slope /= np.float32(len(targets))
        # einsum's plain loop, and not BLAS, whose threads may add in another order.
        return loss, {"bias": slope.sum(axis=0), "weight": np.einsum("bi,bo->io", inputs, slope)}

    def evaluate(self, parameters: Parameters, inputs: Array, targets: Array) -> Sums:
        """Cross-entropy and correct predictions."""
        logs = _log_softmax(parameters, inputs)
        loss = -float(logs[np.arange(len(targets)), targets].sum(dtype=np.float64))
        return Sums(loss, float((logs.argmax(axis=1) == targets).sum()), len(targets))

    def examples(self, inputs: Array, targets: Array) -> list[Example]:
        """See `ExampleWorkload`."""
        return labelled_images(draw_digits(inputs), targets)

    def outputs(self, parameters: Parameters, inputs: Array) -> list[int | str]:
        """Predicted digits."""
        return [*map(int, _log_softmax(parameters, inputs).argmax(axis=1))]


def _log_softmax(parameters: Parameters, inputs: Array) -> NDArray[np.float32]:
    logits = np.einsum("bi,io->bo", inputs, parameters["weight"]) + parameters["bias"]
    logits -= logits.max(axis=1, keepdims=True)
    result: NDArray[np.float32] = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    return result


def digits_softmax(_options: Options) -> DigitsSoftmax:
    """Builder of ``digits-softmax``."""
    return DigitsSoftmax()


SAMPLES = 1 << 16


class Null:
    """One tensor of a wanted size, zeros at first. Implements `NumpyWorkload`."""

    def __init__(self, parameters: int) -> None:
        self.parameters = parameters

    def load(self, data_dir: str) -> Dataset:
        """Samples that hold nothing."""
        return Dataset(_nothing(SAMPLES), _nothing(1))

    def initial(self, seed: int) -> dict[str, NDArray[np.float32]]:
        """Zeros."""
        return {"weight": np.zeros(self.parameters, dtype=np.float32)}

    def gradient(
        self, parameters: Parameters, inputs: Array, targets: Array
    ) -> tuple[float, dict[str, NDArray[np.float32]]]:
        """Zero."""
        return 0.0, self.initial(0)

    def evaluate(self, parameters: Parameters, inputs: Array, targets: Array) -> Sums:
        """Return no loss and no score."""
        return Sums(0.0, 0.0, len(targets))


def _nothing(count: int) -> ArraySamples:
    return ArraySamples(np.empty((count, 0)), np.empty((count, 0)), np.zeros(count, dtype=np.int64))


def null(options: Options) -> Null:
    """Builder of ``null``."""
    return Null(int(options["parameters"]))

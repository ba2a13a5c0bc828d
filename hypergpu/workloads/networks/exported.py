"""Models that `hypergpu job export` wrote, back in memory: what a `load.py` beside one calls."""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from hypergpu.programs.container import PROGRAM_PATH
from hypergpu.workloads.datasets import DatasetError
from hypergpu.workloads.entry import (
    NODE_DATA_FIELD,
    OPTIONS_FIELD,
    WORKLOAD_FIELD,
    Options,
    OptionValue,
)
from hypergpu.workloads.evaluation import EvaluationTotals, Sums
from hypergpu.workloads.node_data import held_out_dataset
from hypergpu.workloads.registry import BuilderMissingError, UnknownWorkloadError, build, find
from hypergpu.workloads.workload import JobWorkload, LargeSamplesWorkload, NumpyWorkload

_MODEL_NAME = "model.safetensors"
_BATCH = 256
Arrays = dict[str, NDArray[Any]]


class ExportError(ValueError):
    """A folder holds no export that can be loaded. The text says which file, and what to do."""


class TrainedModel(NamedTuple):
    """A model with the workload that it was trained by."""

    name: str
    """The workload's."""
    workload: Any
    model: Any
    """A torch module in evaluation mode, or arrays by name for workloads without torch."""
    node_data: str = ""
    """Data set that it was trained on where its owners have it; empty: none."""

    def evaluate(self, data_dir: str = "") -> Sums:
        """Loss and score on the workload's held-out samples.

        Args:
            data_dir: Folder of the data, where the workload has none of its own.

        Raises:
            hypergpu.workloads.datasets.DatasetError: The data cannot be used.
        """
        has_node_data = self.node_data and data_dir
        read = (
            held_out_dataset(self.workload, data_dir)
            if has_node_data
            else self.workload.load(data_dir)
        )
        samples = read.test
        is_large = isinstance(self.workload, LargeSamplesWorkload)
        batch = self.workload.evaluation_batch if is_large else _BATCH
        totals = EvaluationTotals(self.workload)
        for start in range(0, len(samples.labels), batch):
            indices = np.arange(start, min(start + batch, len(samples.labels)))
            self._evaluate_batch(totals, *samples.batch(indices))
        return totals.sums()

    def _evaluate_batch(self, totals: EvaluationTotals, *fields: NDArray[Any]) -> None:
        if isinstance(self.model, Mapping):
            totals.add(self.model, *fields)
            return
        import torch

        with torch.inference_mode():
            totals.add(self.model, *map(torch.from_numpy, fields))


def export_options(folder: Path) -> Options:
    """Options of the workload that an export was trained with.

    Raises:
        ExportError: There is no model.
    """
    _, metadata = _read(folder / _MODEL_NAME)
    return msgspec.json.decode(metadata.get(OPTIONS_FIELD, "{}"), type=dict[str, OptionValue])


def load_export(folder: Path, data_dir: str = "", **changes: OptionValue) -> TrainedModel:
    """Load the model of an export, on the CPU.

    Args:
        folder: The export's.
        data_dir: The job's folder of data, where the model needs some of it.
        changes: Options of the workload that are others than in the job.

    Raises:
        ExportError: There is no model, or it is not one of this workload.
        hypergpu.workloads.registry.BuilderMissingError: The workload needs a module, such as torch.
    """
    arrays, metadata = _read(folder / _MODEL_NAME)
    name = metadata.get(WORKLOAD_FIELD, "")
    if not name:
        raise ExportError(f"{folder / _MODEL_NAME} names no workload: export the job again")
    entry = find(name)
    options = msgspec.json.decode(metadata[OPTIONS_FIELD], type=dict[str, OptionValue])
    workload = build(entry, options | changes)
    if entry.name == "program" and (folder / PROGRAM_PATH).is_file():
        return _program(folder)
    if isinstance(workload, JobWorkload) and data_dir:
        workload = workload.for_job(data_dir)
    elif isinstance(workload, JobWorkload) and entry.name != "program":
        raise ExportError(
            "this model is a part of another, base/ in the job's folder of data. Fix: give that"
            " folder: python load.py FOLDER; what hypergpu.finetune saved is whole in merged/"
        )
    elif isinstance(workload, JobWorkload):
        raise ExportError(
            "this model came by hypergpu.train, and its program is not beside it. Fix: hypergpu"
            " job export JOB, which writes both; where it does not, the coordinator is older"
        )
    if entry.kind == "null":
        raise ExportError(f"workload {name} trains nothing: there is no model to load")
    is_numpy = entry.kind == "numpy"
    model = _checked_arrays(workload, arrays) if is_numpy else _module(workload, arrays)
    return TrainedModel(name, workload, model, metadata.get(NODE_DATA_FIELD, ""))


def _program(folder: Path) -> TrainedModel:
    """A model of one's own, run from its program."""
    from hypergpu.workloads.networks.exported_program import ExportedProgram

    workload = ExportedProgram(folder, folder / _MODEL_NAME)
    return TrainedModel("program", workload, workload.model())


def _read(path: Path) -> tuple[Arrays, Mapping[str, str]]:
    try:
        with safe_open(path, "np") as file:
            return {name: file.get_tensor(name) for name in file.keys()}, file.metadata() or {}  # noqa: SIM118 - no mapping
    except (SafetensorError, OSError) as error:
        raise ExportError(f"{path} cannot be read, export the job again: {error}") from error


def _checked_arrays(workload: NumpyWorkload, arrays: Arrays) -> Arrays:
    _check_shapes({name: each.shape for name, each in workload.initial(0).items()}, arrays)
    return arrays


def _module(workload: Any, arrays: Arrays) -> Any:
    import torch

    from hypergpu.workloads.networks.task import named_tensors

    model = workload.model().eval()
    tensors = {name: tensor for name, (_, tensor) in named_tensors(model).items()}
    _check_shapes({name: tuple(tensor.shape) for name, tensor in tensors.items()}, arrays)
    with torch.no_grad():
        for name, tensor in tensors.items():
            tensor.copy_(torch.from_numpy(arrays[name]))
    return model


def _check_shapes(wanted: Mapping[str, tuple[int, ...]], arrays: Arrays) -> None:
    for name in sorted(wanted.keys() | arrays.keys()):
        if name.startswith("base_") and name not in arrays:
            raise ExportError(
                "the model was trained on another base than the one in this folder: give the job's"
            )
        here = arrays[name].shape if name in arrays else "not there"
        if here != (there := wanted.get(name, "not there")):
            raise ExportError(
                f"tensor {name} is {here} in the file and {there} in the workload as installed:"
                " install the version that trained it"
            )


def _without_data(trained: TrainedModel) -> str:
    """What was loaded, where there is nothing to evaluate it on."""
    from hypergpu.workloads.networks.exported_program import fields_text

    count = sum(each.numel() for each in trained.model.parameters())
    return (
        f"loaded a program of {count:,} parameters; python load.py DATA evaluates it on an .npz or"
        f" .parquet file, or a folder of them, with {fields_text(trained.workload.fields)}\n"
    )


def main(folder: Path) -> None:
    """Evaluate an export and print the result; the first argument of the command is the data's
    folder, where the workload has none of its own.
    """
    try:
        data_dir = sys.argv[1] if len(sys.argv) > 1 else ""
        trained_model = load_export(folder, data_dir)
        if trained_model.name == "program" and not data_dir:
            sys.stdout.write(_without_data(trained_model))
            return
        sums = trained_model.evaluate(data_dir)
    except (ExportError, DatasetError, BuilderMissingError, UnknownWorkloadError) as error:
        sys.exit(f"error: {error}")
    if trained_model.node_data:
        where = "on the nodes that have them"
        sys.stdout.write(f"trained on data that stayed {where}: {trained_model.node_data}\n")
    names = list(sums.metrics) or [find(trained_model.name).metric]
    metrics = "".join(f"{name} {sums.metric(name):.4f}, " for name in names)
    loss = sums.loss / sums.samples
    sys.stdout.write(
        f"{trained_model.name}: {metrics}loss {loss:.4f} on {sums.samples} held-out samples\n"
    )

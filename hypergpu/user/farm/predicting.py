"""`hypergpu.predict`: what a trained classifier or program says of a few rows, computed by nodes.

It is a farm job of the kind ``classify`` or ``program`` underneath: the model and the rows are
sent, and what comes back is what `hypergpu.map` gives.
"""

import functools
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypedDict, Unpack

import msgspec
import numpy as np
from safetensors.numpy import save_file

from hypergpu.errors import HyperGPUError, Reason
from hypergpu.programs.container import PROGRAM_PATH
from hypergpu.programs.samples import SamplesError, stored_array
from hypergpu.user.client import Coordinator
from hypergpu.user.farm.input_chunks import write_array_chunks
from hypergpu.user.farm.request import settings_of
from hypergpu.user.farm.starting import JobParts, MapOrder, start_in_scratch
from hypergpu.user.training.bases import find_base
from hypergpu.user.training.connecting import connect_until_exit
from hypergpu.user.training.datasets import DataSource
from hypergpu.user.training.merging import merge_export

CLASSIFIERS = frozenset({"hf-text-classifier", "hf-image-classifier"})
PROGRAM = "program"
_WRITE_OUTPUT = "hypergpu.workloads.networks.exported_output"
_EXAMPLES = 16
_OWN = frozenset({"coordinator", "base", "output", "which", "allow_hub"})


class PredictArguments(TypedDict, total=False):
    """What `predict` takes beside model and data. All have defaults."""

    coordinator: Coordinator
    """An open connection; else the one that environment, settings file or `hypergpu up` name."""
    base: str
    """Folder of what a classifier's job fine-tunes, or its name on the hub."""
    allow_hub: bool
    """Whether a base that is not on this machine is downloaded from the hub."""
    output: str
    """Name of a program's output; else its first one."""
    which: str
    """Which model of a job: ``latest`` or ``best``."""
    text_field: str
    """Field of a row that is the text; else ``text``, or the only one."""
    id_field: str
    """Field of a row that is its id; else its position."""
    requirements: tuple[str, ...]
    """What nodes must have."""


def predict(model: str | Path, rows: Any, **settings: Unpack[PredictArguments]) -> Any:
    """What a model says of each row. It is `hypergpu.predict`.

    Args:
        model: Id of a job that trained a classifier or a model of one's own, the folder of an
            export of it, or the folder of a classifier as transformers saves it.
        rows: A file, a folder, a DataFrame or a list, as `hypergpu.map` takes them; a list of texts
            for a classifier of texts.
        settings: See `PredictArguments`.

    Returns:
        For a classifier a DataFrame with ``label``, ``score`` and ``scores``, else
        ``float32[rows, ...]``.

    Raises:
        HyperGPUError: The model predicts nothing, or data or settings cannot be used.
    """
    coordinator = settings.get("coordinator") or connect_until_exit()
    with tempfile.TemporaryDirectory(prefix="hypergpu-predict-") as scratch:
        folder = _model_folder(coordinator, model, settings, Path(scratch))
        others = {name: value for name, value in settings.items() if name not in _OWN}
        if (folder / PROGRAM_PATH).is_file():
            read = functools.partial(_output_parts, folder, settings.get("output", ""))
            order = MapOrder(settings_of(PROGRAM, others), rows, Path(), read=read)
        else:
            map_settings = settings_of("classify", {"base": str(folder), **others})
            order = MapOrder(map_settings, rows, Path())
        return start_in_scratch(coordinator, order).result()


def _model_folder(
    coordinator: Coordinator, model: str | Path, settings: PredictArguments, scratch: Path
) -> Path:
    """Folder of a program's export, or of a whole classifier."""
    if Path(model).expanduser().is_dir():
        return _whole_model(Path(model).expanduser(), settings)
    job = coordinator.find_job(str(model))
    workload = str(coordinator.job(job).spec.get("workload", ""))
    if workload not in CLASSIFIERS | {PROGRAM}:
        detail = f"{job} is a job of workload {workload or 'unknown'}"
        fix = f"models that write texts are served: hypergpu serve {job}"
        raise HyperGPUError(Reason.ARGUMENT_INVALID, f"{detail}, which predicts nothing", fix=fix)
    export = scratch / "export"
    coordinator.export(job, export, which=settings.get("which", "latest"))
    return _whole_model(export, settings)


def _whole_model(folder: Path, settings: PredictArguments) -> Path:
    if (folder / PROGRAM_PATH).is_file():
        return folder
    if (folder / "merged").is_dir():
        return folder / "merged"
    if not (folder / "model.safetensors").is_file() or (folder / "config.json").is_file():
        return folder
    base = settings.get("base", "")
    if not base:
        detail = "the adapter of a classifier alone predicts nothing"
        fix = "give what the job fine-tunes: --base FOLDER"
        raise HyperGPUError(Reason.ARGUMENT_INVALID, detail, fix=fix)
    return merge_export(folder, find_base(base, allow_hub=settings.get("allow_hub", False)))


def _output_parts(export: Path, output: str, order: MapOrder, folder: Path) -> JobParts:
    """Rows as items, and the program of an output, which a process of its own writes: see
    `hypergpu.workloads.networks.exported_output`.
    """
    try:
        arrays = _joined_fields(DataSource(order.data, "rows"))
    except SamplesError as error:
        detail, _, fix = str(error).partition(" Fix: ")
        raise HyperGPUError(
            Reason.ARGUMENT_INVALID, detail.rstrip("."), fix=fix or "see docs/serve.md"
        ) from error
    examples = folder / "examples"
    save_file({name: array[:_EXAMPLES] for name, array in arrays.items()}, examples)
    words = [str(export), str(examples), str(folder), *([output] if output else [])]
    command = [sys.executable, "-m", _WRITE_OUTPUT, *words]
    process = subprocess.run(command, check=False, capture_output=True, text=True)
    examples.unlink()
    if process.returncode:
        last_line = process.stderr.strip().rpartition("\n")[2].removeprefix("error: ")
        detail, _, fix = last_line.partition(" Fix: ")
        raise HyperGPUError(
            Reason.ARGUMENT_INVALID, detail.rstrip("."), fix=fix or "see docs/serve.md"
        )
    fields = msgspec.json.decode((folder / "fields").read_bytes(), type=tuple[str, ...])
    items = write_array_chunks([{name: arrays[name] for name in fields}], folder)
    return JobParts(items, {name: folder / name for name in ("program", "tensors")})


def _joined_fields(source: DataSource) -> dict[str, np.ndarray[Any, Any]]:
    """All rows of some data, an array a field."""
    batches: list[Mapping[str, Any]] = list(source.batches())
    return {
        name: np.concatenate(
            [np.asarray(stored_array("rows", name, batch[name])) for batch in batches]
        )
        for name in next(iter(batches), {})
    }

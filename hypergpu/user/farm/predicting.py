"""`hypergpu.predict`: what a trained classifier or program says of a few rows, computed by nodes.

It is a farm job of the kind ``classify`` or ``program`` underneath: the model and the rows are
sent, and what comes back is what `hypergpu.map` gives.
"""

import functools
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypedDict, Unpack

import numpy as np

from hypergpu.errors import HyperGPUError, Reason
from hypergpu.programs.container import PROGRAM_PATH
from hypergpu.programs.samples import SamplesError
from hypergpu.user.client import Coordinator
from hypergpu.user.farm import mapping
from hypergpu.user.training.bases import find_base
from hypergpu.user.training.datasets import DataSource
from hypergpu.user.training.merging import merge_export
from hypergpu.user.training.run import Run
from hypergpu.user.training.train import connect_until_exit
from hypergpu.workloads.datasets import DatasetError

if TYPE_CHECKING:
    from hypergpu.workloads.networks.tracing import Module

CLASSIFIERS = frozenset({"hf-text-classifier", "hf-image-classifier"})
PROGRAM = "program"
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


class _PredictSource(NamedTuple):
    """Where the model is."""

    job: str
    """Empty: it is a folder."""
    folder: Path


def predict(model: str | Path | Run, rows: Any, **settings: Unpack[PredictArguments]) -> Any:
    """What a model says of each row. It is `hypergpu.predict`.

    Args:
        model: A run or the id of a job that trained a classifier or a model of one's own, the
            folder of an export of it, or the folder of a classifier as transformers saves it.
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
        arguments: dict[str, Any] = {"coordinator": coordinator, **others}
        if (folder / PROGRAM_PATH).is_file():
            module, fields = _program_module(folder, rows, settings.get("output", ""))
            run = mapping.map(module, data=fields, **arguments)
        else:
            run = mapping.map("classify", data=rows, base=str(folder), **arguments)
        return run.result()


def predict_by_module(run: Run, module: "Module", rows: Any, **settings: Any) -> Any:
    """What a module of the user's own gives of each row, with the weights of a run.

    Args:
        run: Trained the module.
        module: Takes the data's fields in order and gives one tensor; its weights are loaded.
        rows: As `hypergpu.train` takes them, without targets.
        settings: As `hypergpu.map` takes them.
    """
    module.load_state_dict(run.state_dict())
    return mapping.map(module, data=rows, **settings).result()


def _model_folder(
    coordinator: Coordinator, model: str | Path | Run, settings: PredictArguments, scratch: Path
) -> Path:
    """Folder of a program's export, or of a whole classifier."""
    if not isinstance(model, Run) and Path(model).expanduser().is_dir():
        return _whole_model(Path(model).expanduser(), settings)
    job = model.id if isinstance(model, Run) else coordinator.find_job(str(model))
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


def _program_module(
    folder: Path, rows: Any, output: str
) -> tuple["Module", dict[str, np.ndarray[Any, Any]]]:
    """The output of a program as a module, and the fields that it takes."""
    # Imported here: it needs torch, which takes seconds.
    from hypergpu.workloads.networks.exported_output import ProgramOutput

    try:
        arrays = _joined_fields(DataSource(rows, "data"))
        module = ProgramOutput(folder, output, tuple(arrays))
    except (DatasetError, SamplesError) as error:
        detail, _, fix = str(error).partition(" Fix: ")
        raise HyperGPUError(
            Reason.ARGUMENT_INVALID, detail.rstrip("."), fix=fix or "see docs/serve.md"
        ) from error
    return module, {name: arrays[name] for name in module.fields}


def _joined_fields(source: DataSource) -> dict[str, np.ndarray[Any, Any]]:
    """All rows of some data, an array a field."""
    batches: list[Mapping[str, Any]] = list(source.batches())
    join = functools.partial(np.concatenate, axis=0)
    return {
        name: join([np.asarray(batch[name]) for batch in batches])
        for name in next(iter(batches), {})
    }

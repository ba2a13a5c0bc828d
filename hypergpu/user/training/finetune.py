"""`hypergpu.finetune`: a model of Hugging Face and rows become a job that trains an adapter."""

import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

import msgspec

from hypergpu.errors import HyperGPUError, Reason
from hypergpu.jobfile.keys import Scalar
from hypergpu.jobfile.spec import JobSpec
from hypergpu.user.client import Coordinator, ExportedModel
from hypergpu.user.sinks.sink import named_sinks
from hypergpu.user.terminal.output import progress_bars
from hypergpu.user.training.bases import find_base, link_base
from hypergpu.user.training.connecting import connect_until_exit
from hypergpu.user.training.run import Run
from hypergpu.user.training.train import TrainArguments, job_spec, tell_note
from hypergpu.workloads.datasets import DatasetError
from hypergpu.workloads.entry import OptionError, missing_modules
from hypergpu.workloads.finetuning.row_files import SUFFIXES, choose_files
from hypergpu.workloads.finetuning.rows import base_digest
from hypergpu.workloads.registry import build_for_job, find
from hypergpu.workloads.splits import HELD_OUT, TRAIN
from hypergpu.workloads.workload import CheckedWorkload

if TYPE_CHECKING:
    from hypergpu.workloads.networks.tracing import Module


class FinetuneArguments(TrainArguments, total=False):
    """What `finetune` takes besides the base; ``data`` and ``held_out`` are rows here: objects with
    the fields that docs/finetune.md names, or a file or folder of such. An image classifier takes a
    folder of images.
    """

    options: Mapping[str, Scalar]
    """Options of the workload, such as ``{"rank": 16}``."""
    workload: str
    allow_hub: bool
    """Whether a base that is not on this machine is downloaded from the hub; nodes never do."""


class AdapterRun(Run):
    """A job that trains an adapter of a base that lies on this machine."""

    def __init__(self, coordinator: Coordinator, job_id: str, base: Path | None = None) -> None:
        super().__init__(coordinator, job_id)
        self._base = base

    def save(self, folder: Path | str, which: str = "latest") -> ExportedModel:
        """Write the adapter and its card, ``adapter/`` for peft and ``merged/`` for transformers.

        The last two need the base, which a run that was found again does not know: then
        `hypergpu job merge` writes them.
        """
        exported_model = super().save(folder, which)
        if self._base is None:
            return exported_model
        from hypergpu.workloads.finetuning.export import write_folders

        with tempfile.TemporaryDirectory(prefix="hypergpu-") as job:
            link_base(self._base, Path(job))
            write_folders(Path(folder), job)
        return exported_model

    def predict(self, rows: Any, *, module: "Module | None" = None, **settings: Any) -> Any:
        """See `Run.predict`; of a classifier, by the base that it fine-tunes."""
        if self._base is not None:
            settings = {"base": str(self._base), **settings}
        return super().predict(rows, module=module, **settings)

    def serve(self, **settings: Any) -> Any:
        """Have nodes hold the model: gives a `ServedModel`, see `hypergpu.serve`."""
        serving_module = import_module("hypergpu.user.serving.model")
        return serving_module.serve(self, coordinator=self._coordinator, **settings)

    def generate(self, prompt: Any, **settings: Any) -> str:
        """The answer of the model of the newest round to a prompt; see `ServedModel.generate`.

        The model is served by the job's id, and follows its rounds, until `hypergpu serve stop`.
        """
        serving_module = import_module("hypergpu.user.serving.model")
        text: str = serving_module.served_run(self, self._coordinator).generate(prompt, **settings)
        return text


def finetune(base: str | Path, **settings: Unpack[FinetuneArguments]) -> AdapterRun:
    """Send a base and rows to a coordinator, and start training an adapter.

    Returns as soon as the data are there. A base that the coordinator has is not sent again.

    Args:
        base: Folder of a model as ``save_pretrained`` writes it, or its name on the hub, which must
            be in the hub's cache on this machine unless ``allow_hub`` is given.
        settings: Rows and settings, see `FinetuneArguments`.

    Base, rows and chat template are checked here, before anything is sent, where the extra ``hf``
    is installed; else the coordinator checks them as it prepares the job.

    Raises:
        HyperGPUError: The base or the rows cannot be used, or the job is refused. The text says
            what to do.
    """
    folder = find_base(base, allow_hub=settings.get("allow_hub", False))
    options = {"base_digest": base_digest(folder), **settings.get("options", {})}
    arguments: dict[str, Any] = {
        name: each
        for name, each in settings.items()
        if name not in {"options", "workload", "allow_hub"}
    }
    arguments["settings"] = {
        **settings.get("settings", {}),
        **{f"options.{name}": value for name, value in options.items()},
    }
    spec = job_spec(arguments, workload=settings.get("workload", "hf-causal-lm"))  # type: ignore[arg-type]
    sinks = named_sinks(settings.get("sinks", ()))
    coordinator = settings.get("coordinator") or connect_until_exit()
    with tempfile.TemporaryDirectory(prefix="hypergpu-") as job, progress_bars() as report:
        link_base(folder, Path(job))
        train = None if spec.data.stays_on_nodes else settings["data"]
        write_parts(Path(job), spec.workload, train, settings.get("held_out"))
        check_job(Path(job), spec)
        job_id = coordinator.submit(spec, beside=Path(job), report=report)
    tell_note(spec)
    run = AdapterRun(coordinator, job_id, folder)
    run.sinks = sinks
    return run


_IMAGES = "images"
_IMAGE_WORKLOAD = "hf-image-classifier"


def write_parts(job: Path, workload: str, train: Any, held_out: Any) -> None:
    """Make data to train on and to hold out parts of a job's folder.

    Args:
        job: The job's folder.
        workload: Its name, which decides whether data are rows or images.
        train: None where these stay on nodes.
        held_out: None where none are given.

    Raises:
        HyperGPUError: They are of no known kind.
    """
    if workload != _IMAGE_WORKLOAD:
        if train is not None:
            write_rows(job, TRAIN, train, is_alone=held_out is None)
        if held_out is not None:
            write_rows(job, HELD_OUT, held_out)
        return
    parts = {TRAIN: train, "val": held_out}
    given_parts = {part: each for part, each in parts.items() if each is not None}
    for part, each in given_parts.items():
        _link_images(job / _IMAGES / (part if len(given_parts) > 1 else ""), each)


def _link_images(target: Path, source: Any) -> None:
    if not isinstance(source, str | Path) or not (folder := Path(source).expanduser()).is_dir():
        raise HyperGPUError(
            Reason.SPEC_INVALID,
            f"data of an image classifier are {type(source).__name__} {str(source)[:80]!r}",
            fix="give a folder with one sub-folder of images a class",
        )
    for path in sorted(folder.rglob("*")):
        if path.is_file() and not path.name.startswith("."):
            place = target / path.relative_to(folder)
            place.parent.mkdir(parents=True, exist_ok=True)
            place.symlink_to(path.resolve())


def check_job(job: Path, spec: JobSpec) -> None:
    """Check base and data of a job's folder as its nodes will, without reading a weight.

    Raises:
        HyperGPUError: They cannot be used.
    """
    entry = find(spec.workload)
    if missing_modules(entry):
        return
    try:
        workload = build_for_job(entry, spec.options, str(job))
        if isinstance(workload, CheckedWorkload):
            workload.check(str(job), has_train=not spec.data.stays_on_nodes)
    except (DatasetError, OptionError) as wrong:
        detail, _, fix = str(wrong).partition(" Fix: ")
        raise HyperGPUError(Reason.SPEC_INVALID, detail.rstrip("."), fix=fix) from wrong


def write_rows(job: Path, part: str, rows: Any, *, is_alone: bool = False) -> None:
    """Make rows a part of a job's folder.

    Args:
        job: The job's folder.
        part: ``train`` or ``held_out``.
        rows: Objects, or a file or folder of such.
        is_alone: Whether what a folder holds out itself becomes the other part.

    Raises:
        HyperGPUError: They are of no known kind.
    """
    if isinstance(rows, str | Path):
        _link_rows(job, part, Path(rows).expanduser(), is_alone=is_alone)
        return
    if not isinstance(rows, Iterable) or isinstance(rows, Mapping):
        raise HyperGPUError(
            Reason.SPEC_INVALID,
            f"{part}: rows of type {type(rows).__name__}",
            fix="give a list of objects such as {'text': ...}, or a file or folder of them",
        )
    encoder = msgspec.json.Encoder()
    with (job / f"{part}.jsonl").open("wb") as file, _translate_rows(part):
        for row in rows:
            file.write(encoder.encode(row) + b"\n")


@contextmanager
def _translate_rows(part: str) -> Iterator[None]:
    try:
        yield
    except (TypeError, ValueError) as wrong:
        raise HyperGPUError(
            Reason.SPEC_INVALID, f"{part}: a row is no JSON: {wrong}", fix="give plain values"
        ) from wrong


def _link_rows(job: Path, part: str, source: Path, *, is_alone: bool) -> None:
    if source.is_file():
        files = choose_files(source.parent)._replace(train=(source,), held_out=())
    else:
        files = choose_files(source)
    if not files.train or not source.exists():
        raise HyperGPUError(
            Reason.FILE_UNUSABLE,
            f"{source} holds no rows{files.told_left_out}",
            fix=f"give files ending in {', '.join(SUFFIXES)}",
        )
    paths = files.train if part == TRAIN else files.only_held_out().held_out
    _link_files(job / part, files.folder, paths)
    if is_alone:
        _link_files(job / HELD_OUT, files.folder, files.held_out)


def _link_files(target: Path, folder: Path, paths: Sequence[Path]) -> None:
    for path in paths:
        place = target / path.relative_to(folder)
        place.parent.mkdir(parents=True, exist_ok=True)
        place.symlink_to(path.resolve())

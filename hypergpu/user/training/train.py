"""`hypergpu.train` and `train_async`: a torch module, its loss and data in memory become a job."""

import asyncio
import math
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Required, Self, TypedDict, Unpack

from hypergpu.errors import HyperGPUError, Reason
from hypergpu.jobfile.keys import Scalar
from hypergpu.jobfile.notes import submit_note
from hypergpu.jobfile.reading import parse_job_table
from hypergpu.jobfile.spec import JobSpec, TrainingSettings
from hypergpu.jobfile.toml import KeyLines
from hypergpu.programs.container import Field, ProgramError
from hypergpu.programs.sample_files import FORMS
from hypergpu.programs.samples import SamplesError, SampleWriter, label_field
from hypergpu.user.client import AsyncCoordinator, Coordinator, connect_async
from hypergpu.user.sinks.sink import Sink, named_sinks
from hypergpu.user.terminal.output import note, progress_bars, progress_note
from hypergpu.user.training.async_run import AsyncRun, StateNames
from hypergpu.user.training.connecting import connect_until_exit
from hypergpu.user.training.datasets import DataSource, HeldOutSplit, SplitPart, folder_split
from hypergpu.user.training.run import Run
from hypergpu.workloads.metrics import direction, target_mode

if TYPE_CHECKING:
    from hypergpu.workloads.networks.tracing import Loss, Module
    from hypergpu.workloads.networks.whole_set_tracing import EvaluateAllFunction


class JobArguments(TypedDict, total=False):
    """What `train` and `train_async` take besides model, loss and connection. All but the data have
    the job file's defaults.
    """

    data: Required[Any]
    """A dictionary or tuple of arrays, a torch or Hugging Face dataset, a DataFrame, an ``.npz`` or
    ``.parquet`` file, or a folder of such files. A loss gets its batch in the same form. Or
    ``"node:NAME"``: each node's own data set of that name, which stays there.
    """
    held_out: Any
    """Samples that the model is judged by; without them a tenth of the data, drawn alike each time
    and of each class, but none of data that stay on nodes.
    """
    name: str
    nodes: int
    """The job starts when this many nodes have joined."""
    steps: int
    """Inner steps of each node in all; rounds follow from them."""
    rounds: int
    inner_steps: int
    """Inner steps between two exchanges."""
    batch_size: int
    learning_rate: float
    seed: int
    strategy: str
    """``aware`` by default: see docs/jobs.md."""
    target: float
    """Metric at which the job is finished."""
    target_mode: str
    """``min``: the metric falls to the target; ``max``: it rises; without it its name decides."""
    settings: Mapping[str, Scalar]
    """Any other keys of a job file, such as ``{"codec.up": "int8"}``."""
    sinks: Sequence[Sink | str]
    """Where the run's `watch` and `result` write each round, such as ``["tensorboard:runs"]``."""


class ProgramArguments(JobArguments, total=False):
    """What `train` and `train_async` take besides the connection."""

    evaluate_all: "EvaluateAllFunction"
    """``evaluate_all(outputs)`` gives metrics of all held-out samples together, such as F1, as a
    dictionary of tensors with one number each; the first is the one that a target is about. Its
    outputs are those of the loss, which returns ``(loss, metrics, outputs)`` in evaluation: a
    dictionary of tensors whose first dimension is the samples, 256 MiB of all held-out samples
    together at most.
    """


class TrainArguments(ProgramArguments, total=False):
    """What `train` takes besides model and loss."""

    coordinator: Coordinator
    """An open connection; else the one that environment, settings file or `hypergpu up` name."""


class AsyncTrainArguments(ProgramArguments, total=False):
    """What `train_async` takes besides model and loss."""

    coordinator: AsyncCoordinator
    """As of `train`, from `hypergpu.user.client.connect_async`."""


_OWN = {"coordinator", "data", "evaluate_all", "held_out", "settings", "sinks", "steps"}
_CHECKING = "tracing the model and comparing its program with it on a batch"
_NODE_DATA = "node:"
_PACKAGE = "make it a workload package, see docs/workloads.md#your-own-as-a-package"
_KEYS = {
    "name": "name",
    "strategy": "strategy",
    "nodes": "training.nodes",
    "rounds": "training.rounds",
    "inner_steps": "training.inner_steps",
    "batch_size": "training.batch_size",
    "seed": "training.seed",
    "learning_rate": "inner.learning_rate",
    "target": "evaluation.target",
    "target_mode": "evaluation.target_mode",
}


def train(
    model: "Module",
    *,
    loss: "Loss",
    **settings: Unpack[TrainArguments],
) -> Run:
    """Send a model, its loss and data to a coordinator, and start training them.

    Returns as soon as the data are there. Model and loss are traced: nodes get a graph of torch's
    operators and no code. Training starts from the model's own weights; parameters that require no
    gradient stay as they are.

    Args:
        model: Any module that `torch.export` can trace.
        loss: ``loss(model, batch)`` gives the mean loss, or that and a dictionary of metrics, of
            which the first is the one that a target is about, or these and, in evaluation, outputs
            for `TrainArguments.evaluate_all`.
        settings: Data and settings, see `TrainArguments`.

    Raises:
        HyperGPUError: The model cannot be traced, the data cannot be used, or the job is refused.
            The text says what to do.
    """
    spec = job_spec(settings)
    sinks = named_sinks(settings.get("sinks", ()))
    coordinator = settings.get("coordinator") or connect_until_exit()
    with tempfile.TemporaryDirectory(prefix="hypergpu-") as folder, translate_errors():
        with progress_note(_CHECKING):
            samples, evaluate_all = JobSamples.of(settings, spec), settings.get("evaluate_all")
            write_job(Path(folder), model, loss, samples, spec, evaluate_all)
        with progress_bars() as report:
            job_id = coordinator.submit(spec, beside=Path(folder), report=report)
    tell_note(spec)
    run = Run(coordinator, job_id, StateNames.of(model))
    run.sinks = sinks
    return run


async def train_async(
    model: "Module",
    *,
    loss: "Loss",
    **settings: Unpack[AsyncTrainArguments],
) -> AsyncRun:
    """Do what `train` does without blocking the event loop: model and loss are traced in a thread.

    Args:
        model: As of `train`; nobody else may use it until this returns.
        loss: As of `train`.
        settings: Data and settings, see `AsyncTrainArguments`.

    Raises:
        HyperGPUError: As `train`.
    """
    spec = job_spec(settings)
    sinks = named_sinks(settings.get("sinks", ()))
    coordinator = settings.get("coordinator") or await connect_async()
    with tempfile.TemporaryDirectory(prefix="hypergpu-") as folder, translate_errors():
        samples = JobSamples.of(settings, spec)
        with progress_note(_CHECKING):
            evaluate_all = settings.get("evaluate_all")
            await asyncio.to_thread(
                write_job, Path(folder), model, loss, samples, spec, evaluate_all
            )
        with progress_bars() as report:
            job_id = await coordinator.submit(spec, beside=Path(folder), report=report)
    tell_note(spec)
    run = AsyncRun(coordinator, job_id, StateNames.of(model))
    run.sinks = tuple(sinks)
    return run


def tell_note(spec: JobSpec) -> None:
    """Tell what a job's settings come to, in one line where there is something to tell."""
    if note_text := submit_note(spec):
        note(note_text)


class JobSamples:
    """A user's training and held-out data; the former are None where they stay on nodes."""

    def __init__(self, train: Any, held_out: Any, label: str = "") -> None:
        self._label = label
        self._train = None if train is None else DataSource(train, "data")
        self._held_out = None if held_out is None else DataSource(held_out, "held_out")
        first_part = self._train or self._held_out
        self.is_tuple = first_part is not None and first_part.is_tuple

    @classmethod
    def of(cls, given: JobArguments, spec: JobSpec) -> Self:
        """Those that a call was given; parts that the files of a folder name are told."""
        train, held_out = given["data"], given.get("held_out")
        if spec.data.stays_on_nodes:
            train = None
        elif held_out is None and (split := folder_split(train)) is not None:
            train, held_out = SplitPart(split.train), SplitPart(split.held_out)
            names = (", ".join(path.name for path in paths[:4]) for paths in split)
            note("training on {}; held out {}".format(*names))
        return cls(train, held_out, str(spec.options.get("label", "")))

    def write(self, folder: Path) -> tuple[Field, ...]:
        """Write both parts into a job's folder and return their fields."""
        writer, train, held_out = SampleWriter(folder), self._train, self._held_out
        held_out_batches = held_out.batches() if held_out is not None else iter(())
        if train is not None and held_out is not None:
            writer.write_part("train", train.batches())
        elif train is not None:
            split = HeldOutSplit.draw(train.batches(), self._label)
            writer.write_part("train", split.train(train.batches()))
            held_out_batches = split.held_out(train.batches())
        fields = writer.write_part("held_out", held_out_batches)
        writer.close()
        return fields


def write_job(
    folder: Path,
    model: "Module",
    loss: "Loss",
    samples: JobSamples,
    spec: JobSpec,
    evaluate_all: "EvaluateAllFunction | None" = None,
) -> None:
    """Write a job's data folder: program, weights and samples.

    The program is compared with the model on a batch of the data.

    Raises:
        ProgramError: The model cannot be traced, or its program computes otherwise.
        SamplesError: The data cannot be used.
    """
    # Imported here: it needs torch, which takes seconds.
    from hypergpu.workloads.networks.checked_program import UserCode, write_checked_program
    from hypergpu.workloads.networks.tracing import BatchShape

    fields = samples.write(folder)
    shape = BatchShape(tuple(each.name for each in fields), samples.is_tuple)
    label = str(spec.options.get("label", ""))
    batch_size = spec.training.batch_size
    code = UserCode(model, loss, evaluate_all)
    traced_program = write_checked_program(folder, code, shape, batch_size=batch_size, label=label)
    check_target(spec, next(iter(traced_program.program.metric_names), "loss"))
    if spec.data.sharding == "dirichlet" and label_field(fields, label) is None:
        raise SamplesError(
            "dirichlet divides samples by their class, and it is not clear which field says it."
            ' Fix: settings={"options.label": NAME}, a field with a whole number for each sample'
        )


def check_target(spec: JobSpec, metric: str) -> None:
    """Refuse a target of which it is not known whether the metric falls or rises to it.

    Raises:
        HyperGPUError: Neither the job nor the metric's name says so.
    """
    rule = spec.evaluation
    if rule.target and not target_mode(rule.target_mode, direction(metric)):
        raise HyperGPUError(
            Reason.SPEC_INVALID,
            f"target={rule.target:g}, and the name of the metric {metric} does not say whether it"
            " falls or rises",
            fix='give target_mode="min" where it falls, or target_mode="max"',
        )


def job_spec(given: JobArguments, workload: str = "program") -> JobSpec:
    """The job's settings, with data from the folder that it is submitted beside.

    Raises:
        hypergpu.jobfile.toml.JobFileError: They describe no job; all problems at once.
    """
    if "data" not in given:
        raise HyperGPUError(Reason.SPEC_INVALID, "there are no data", fix=f"data= takes {FORMS}")
    tree: dict[str, Any] = {"workload": workload, "data": {"path": "."}}
    if isinstance(named_set := given["data"], str) and named_set.startswith(_NODE_DATA):
        if given.get("held_out") is None:
            detail = f"{named_set} stays on nodes, and there is nothing to judge the model by"
            raise HyperGPUError(Reason.SPEC_INVALID, detail, fix="give held_out=")
        tree["data"] |= {"source": "node", "name": named_set.removeprefix(_NODE_DATA)}
    arguments: dict[str, Any] = dict(given)
    if steps := given.get("steps"):
        if "rounds" in given:
            raise HyperGPUError(
                Reason.SPEC_INVALID, "steps and rounds are both given", fix="keep one of the two"
            )
        each = given.get("inner_steps", TrainingSettings().inner_steps)
        arguments["rounds"] = math.ceil(steps / each)
    keys = {_KEYS[name]: value for name, value in arguments.items() if name in _KEYS}
    own = _OWN if workload == "program" else _OWN - {"evaluate_all"}
    if unknown_names := sorted(arguments.keys() - _KEYS.keys() - own):
        raise HyperGPUError(
            Reason.SPEC_INVALID,
            f"train takes no {', '.join(unknown_names)}",
            fix=f"it takes {', '.join(TrainArguments.__annotations__)}; settings={{...}} takes any"
            " key of a job file",
        )
    for key, value in {**keys, **given.get("settings", {})}.items():
        table, _, name = key.rpartition(".")
        (tree.setdefault(table, {}) if table else tree)[name] = value
    return parse_job_table(tree, KeyLines("hypergpu.train"))


@contextmanager
def translate_errors() -> Iterator[None]:
    """Errors of programs and samples as those of HyperGPU, with the fix apart."""
    try:
        yield
    except (ProgramError, SamplesError) as wrong:
        detail, _, fix = str(wrong).partition(" Fix: ")
        fix = fix or (_PACKAGE if isinstance(wrong, ProgramError) else f"give {FORMS}")
        raise HyperGPUError(Reason.SPEC_INVALID, detail.rstrip("."), fix=fix) from wrong

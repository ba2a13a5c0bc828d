"""The steps of `hypergpu workload check` and their verdicts."""

import tempfile
from collections.abc import Iterator
from importlib.metadata import EntryPoint
from pathlib import Path

import msgspec

from hypergpu.errors import HyperGPUError, Reason
from hypergpu.user.cli.verdicts import FAIL, OK, WARN, Check
from hypergpu.user.cluster.workload_trial import TrialOrder, WorkloadTrial, open_trial
from hypergpu.workloads.entry import (
    OptionError,
    Options,
    WorkloadEntry,
    complete_options,
    missing_modules,
)
from hypergpu.workloads.installed import workload_points
from hypergpu.workloads.registry import UnknownWorkloadError, complaints, find


class WorkloadChecks(msgspec.Struct, frozen=True, tag_field="schema", tag="hypergpu/workload/1"):
    """`workload check`."""

    is_fit: bool
    checks: list[Check]


def entries_named(name: str) -> list[WorkloadEntry]:
    """The workload with this name, or those of the package with it.

    Raises:
        HyperGPUError: WORKLOAD_UNKNOWN, there is none, or its entry cannot be imported.
    """
    points = [point for point in workload_points() if name in _names(point)]
    try:
        return [find(each) for each in ([point.name for point in points] or [name])]
    except UnknownWorkloadError as error:
        own_complaints = [
            text for text in complaints() if any(each.value in text for each in points)
        ]
        detail = own_complaints[0] if own_complaints else str(error)
        fix = (
            "correct the entry point"
            if own_complaints
            else "name one of them, or install its package"
        )
        raise HyperGPUError(Reason.WORKLOAD_UNKNOWN, detail, fix=fix) from error


def _names(point: EntryPoint) -> tuple[str, ...]:
    package = point.dist.name if point.dist else ""
    return (point.name, package, package.replace("-", "_"))


def check_entry(entry: WorkloadEntry, options: Options, data_dir: str) -> Iterator[Check]:
    """A line for each step, until one fails."""
    try:
        complete_options(entry, options)
    except OptionError as wrong:
        yield Check(entry.name, FAIL, str(wrong), "correct --option")
        return
    for module in missing_modules(entry):
        fix = f"pip install '{entry.install or module}'"
        yield Check(entry.name, FAIL, f"it needs the Python module {module}", fix)
        return
    if entry.takes_data == "required" and not data_dir:
        yield Check(entry.name, FAIL, "it trains on your data", "name their folder: --data PATH")
        return
    yield Check(entry.name, OK, f"version {entry.version}: {entry.meaning}")
    with tempfile.TemporaryDirectory(prefix="hypergpu-") as folder:
        order = TrialOrder(entry, options, data_dir, Path(folder))
        step = ["its programs"]
        try:
            with open_trial(order) as trial:
                yield from _steps(order, trial, step)
        except HyperGPUError as error:
            yield Check(step[-1], FAIL, error.detail, error.fix)


def _steps(order: TrialOrder, trial: WorkloadTrial, step: list[str]) -> Iterator[Check]:
    """Lines of the steps that work; names each step in ``step`` before it is taken."""
    step.append("model")
    model = trial.make_model()
    count = model.layout.parameters_count
    yield Check("model", OK, f"{count:,} parameters, {model.samples:,} samples to train on")
    step.append("first model")
    if trial.draw_model() == model.digest:
        yield Check("first model", OK, "a node draws the same from the job's seed")
    else:
        what = "a node draws another from the job's seed, and downloads it in every job"
        fix = "draw initial weights from torch's global generator alone"
        yield Check("first model", WARN, what, fix)
    step.append("evaluation")
    before = trial.evaluate(model)
    step.append("training")
    trial_step = trial.train(model)
    yield Check(
        "training",
        OK,
        f"a step with {trial_step.samples} samples, loss {trial_step.loss:.4g},"
        f" in {trial_step.took_s:.1f} s",
    )
    step.append("evaluation")
    after = trial.evaluate(model)
    what = f"{after.metric_name} {after.metric:.4g}, held-out loss {after.loss:.4g}"
    yield Check("evaluation", OK, f"{what} (before the step {before.loss:.4g})")
    step.append("gradient")
    trial.measure_gradient(model)
    yield Check("gradient", OK, "the held-out loss can be differentiated, so updates are weighed")
    if order.entry.kind != "null":
        step.append("export")
        yield Check("export", OK, f"load.py says {trial.export(model)}")

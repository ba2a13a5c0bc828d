"""Rules for a whole spec, wherever it came from: ranges, choices, combinations, workload."""

from collections.abc import Iterator

from hypergpu.jobfile.limits import CHOICES, LIMITS, NAME_LENGTH_MOST
from hypergpu.jobfile.pay import pay_problems
from hypergpu.jobfile.problem import JobFileError, Problem, join_words, nearest, suggestion
from hypergpu.jobfile.spec import JobSpec
from hypergpu.jobfile.strategies import overlap_problems, strategy_problems
from hypergpu.units import several
from hypergpu.workloads.entry import OptionError, WorkloadEntry, complete_options
from hypergpu.workloads.registry import UnknownWorkloadError, entries, find


def workload_problems(spec: JobSpec) -> Iterator[Problem]:
    """Yield an unknown workload, unknown options, and data that the workload cannot take."""
    if not spec.workload:
        fix = f"choose one of {join_words(entry.name for entry in entries())}"
        yield Problem("workload", "it is missing", fix)
        return
    try:
        entry = find(spec.workload)
    except UnknownWorkloadError:
        yield _unknown_workload(spec.workload)
        return
    yield from _option_problems(entry, spec)
    if entry.metric == "accuracy" and spec.evaluation.target > 1:
        what = f"an accuracy is never above 1, so {spec.evaluation.target:g} is never reached"
        yield Problem("evaluation.target", what, "write 0.97 for 97 %")
    yield from _data_problems(entry, spec)


def _unknown_workload(workload: str) -> Problem:
    names = [entry.name for entry in entries()]
    return Problem("workload", f'there is no workload "{workload}"', suggestion(workload, names))


def _option_problems(entry: WorkloadEntry, spec: JobSpec) -> Iterator[Problem]:
    names = [option.name for option in entry.options]
    for name, value in spec.options.items():
        if name not in names:
            meant = nearest(name, names)
            fix = f"did you mean {meant}?" if meant else f"its options are {join_words(names)}"
            yield Problem(f"options.{name}", f"{entry.name} has no such option", fix)
            continue
        try:
            complete_options(entry, {name: value})
        except OptionError as wrong:
            yield Problem(f"options.{name}", str(wrong), "correct it as said")


def _data_problems(entry: WorkloadEntry, spec: JobSpec) -> Iterator[Problem]:
    if spec.data.path and entry.takes_data == "never":
        what = f"{entry.name} trains on {entry.dataset} only"
        yield Problem("data.path", what, "remove path, or choose a workload that takes data")
    if not spec.data.path and entry.takes_data == "required":
        what = f"{entry.name} needs data of yours"
        yield Problem("data.path", what, 'add path = "FOLDER" in [data]')


def checked_spec(spec: JobSpec) -> JobSpec:
    """Return the spec if it describes a job.

    Raises:
        JobFileError: It does not; all problems at once.
    """
    if problems := spec_problems(spec):
        raise JobFileError(problems)
    return spec


def spec_problems(spec: JobSpec) -> tuple[Problem, ...]:
    """Return all problems of a spec, in the job file's order."""
    return (
        *_name_problems(spec),
        *workload_problems(spec),
        *_range_problems(spec),
        *_choice_problems(spec),
        *strategy_problems(spec),
        *overlap_problems(spec),
        *_pair_problems(spec),
        *pay_problems(spec),
    )


def _value(spec: JobSpec, key: str) -> object:
    table, _, name = key.partition(".")
    return getattr(getattr(spec, table), name) if name else getattr(spec, table)


def _name_problems(spec: JobSpec) -> Iterator[Problem]:
    if len(spec.name) > NAME_LENGTH_MOST:
        what = f"it has {len(spec.name)} characters"
        yield Problem("name", what, f"use at most {NAME_LENGTH_MOST}")
    if not spec.name.isprintable():
        yield Problem("name", "it holds characters that cannot be printed", "remove them")


def _range_problems(spec: JobSpec) -> Iterator[Problem]:
    for key, limit in LIMITS.items():
        value = _value(spec, key)
        if isinstance(value, int | float) and not limit.holds(value):
            yield Problem(key, f"{value} is outside {limit}", f"choose a value in {limit}")


def _choice_problems(spec: JobSpec) -> Iterator[Problem]:
    for key, words in CHOICES.items():
        value = str(_value(spec, key))
        if value not in words:
            yield Problem(key, f'"{value}" is unknown', suggestion(value, words))


def _pair_problems(spec: JobSpec) -> Iterator[Problem]:
    training, split = spec.training, spec.data
    if split.sharding == "dirichlet" and 0 < split.partitions < training.nodes:
        what = f"{several(split.partitions, 'partition')} cannot serve {training.nodes} nodes"
        fix = f"set partitions to at least {training.nodes}, or to 0 for one a node"
        yield Problem("data.partitions", what, fix)
    total_steps = training.rounds * training.inner_steps
    if total_steps > 0 and spec.inner.warmup_steps >= total_steps:
        what = f"a warm-up of {several(spec.inner.warmup_steps, 'step')} outlasts the job"
        fix = f"stay below rounds x inner_steps = {total_steps}"
        yield Problem("inner.warmup_steps", what, fix)

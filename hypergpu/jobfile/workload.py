"""Checks of a job's workload and its options against the known workloads."""

from collections.abc import Iterator

from hypergpu.jobfile.problem import Problem, join_words, nearest
from hypergpu.jobfile.spec import JobSpec
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
    meant = nearest(workload, names)
    fix = f'did you mean "{meant}"?' if meant else f"choose one of {join_words(names)}"
    return Problem("workload", f'there is no workload "{workload}"', fix)


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

"""Rules for a whole spec, wherever it came from: ranges, choices and combinations."""

from collections.abc import Iterator

from hypergpu.jobfile.limits import CHOICES, LIMITS, NAME_LENGTH_MOST
from hypergpu.jobfile.pay import pay_problems
from hypergpu.jobfile.problem import JobFileError, Problem, join_words, nearest
from hypergpu.jobfile.spec import JobSpec
from hypergpu.jobfile.strategies import overlap_problems, strategy_problems
from hypergpu.jobfile.workload import workload_problems
from hypergpu.units import several


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
            meant = nearest(value, words)
            fix = f'did you mean "{meant}"?' if meant else f"choose one of {join_words(words)}"
            yield Problem(key, f'"{value}" is unknown', fix)


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

"""A benchmark in parts: each is shown and kept as it ends, and can be run alone."""

from collections.abc import Callable, Iterable, Mapping, Sequence

import msgspec

from benchmarks.ours.cluster import BenchmarkError
from benchmarks.table import ResultTable

_MISSED = "MISSED,"


class PartFigures(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome of one part: rows for people, metrics for the results file."""

    rows: Sequence[Sequence[str]] = ()
    metrics: Mapping[str, float] = {}
    notes: Sequence[str] = ()


class BenchmarkParts(msgspec.Struct, frozen=True, kw_only=True):
    """A benchmark that measures one part after another."""

    title: str
    columns: Sequence[str]
    parts: Mapping[str, Callable[[], PartFigures]]
    """Measurements by name, in the order to run them."""
    notes: Callable[[], Sequence[str]] = tuple
    """Returns notes on all parts, after the last one ran."""


def run_parts(
    whole: BenchmarkParts, names: Sequence[str], show: Callable[[ResultTable], None]
) -> ResultTable:
    """Measure some parts.

    Args:
        whole: The benchmark.
        names: The parts to run.
        show: Called with each part's table as soon as it is there.
    """
    found: list[PartFigures] = []
    for name in names:
        part = measure_part(name, whole.parts[name])
        show(_table(f"{whole.title}: {name}", whole.columns, part, is_partial=True))
        found.append(part)
    every = merge_figures([*found, PartFigures(notes=whole.notes())])
    is_partial = {*names} != {*whole.parts} or any(map(_is_missed, every.notes))
    return _table(whole.title, whole.columns, every, is_partial=is_partial)


def measure_part(name: str, part: Callable[[], PartFigures]) -> PartFigures:
    """Measure one part. Where it breaks, a note says so and there is no figure."""
    try:
        return part()
    except BenchmarkError as error:
        return PartFigures(notes=[f"{_MISSED} {name}: {error}"])


def _is_missed(note: str) -> bool:
    return note.startswith(_MISSED)


def _table(
    title: str, columns: Sequence[str], found: PartFigures, *, is_partial: bool
) -> ResultTable:
    return ResultTable(
        title=title,
        columns=columns,
        rows=found.rows,
        metrics=found.metrics,
        notes=found.notes,
        is_partial=is_partial,
    )


def merge_figures(parts: Iterable[PartFigures]) -> PartFigures:
    """Join the figures of parts, in order."""
    every = list(parts)
    return PartFigures(
        rows=[row for part in every for row in part.rows],
        metrics={key: value for part in every for key, value in part.metrics.items()},
        notes=[note for part in every for note in part.notes],
    )

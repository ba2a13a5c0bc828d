"""A benchmark in parts: each is shown and kept as it ends, and can be run alone."""

from collections.abc import Callable, Iterable, Mapping, Sequence

import msgspec

from benchmarks.ours.cluster import BenchmarkError
from benchmarks.table import Table

_MISSED = "MISSED,"


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome of one part: rows for people, metrics for the results file."""

    rows: Sequence[Sequence[str]] = ()
    metrics: Mapping[str, float] = {}
    notes: Sequence[str] = ()


class Parts(msgspec.Struct, frozen=True, kw_only=True):
    """A benchmark that measures one part after another."""

    title: str
    columns: Sequence[str]
    parts: Mapping[str, Callable[[], Figures]]
    """Measurements by name, in the order to run them."""
    notes: Callable[[], Sequence[str]] = tuple
    """Returns notes on all parts, after the last one ran."""


def run_parts(whole: Parts, names: Sequence[str], show: Callable[[Table], None]) -> Table:
    """Measure some parts.

    Args:
        whole: The benchmark.
        names: The parts to run.
        show: Called with each part's table as soon as it is there.
    """
    found: list[Figures] = []
    for name in names:
        part = measure_part(name, whole.parts[name])
        show(_table(f"{whole.title}: {name}", whole.columns, part, is_partial=True))
        found.append(part)
    every = merge_figures([*found, Figures(notes=whole.notes())])
    is_partial = {*names} != {*whole.parts} or any(map(_is_missed, every.notes))
    return _table(whole.title, whole.columns, every, is_partial=is_partial)


def measure_part(name: str, part: Callable[[], Figures]) -> Figures:
    """Measure one part. Where it breaks, a note says so and there is no figure."""
    try:
        return part()
    except BenchmarkError as error:
        return Figures(notes=[f"{_MISSED} {name}: {error}"])


def _is_missed(note: str) -> bool:
    return note.startswith(_MISSED)


def _table(title: str, columns: Sequence[str], found: Figures, *, is_partial: bool) -> Table:
    return Table(
        title=title,
        columns=columns,
        rows=found.rows,
        metrics=found.metrics,
        notes=found.notes,
        is_partial=is_partial,
    )


def merge_figures(parts: Iterable[Figures]) -> Figures:
    """Join the figures of parts, in order."""
    every = list(parts)
    return Figures(
        rows=[row for part in every for row in part.rows],
        metrics={key: value for part in every for key, value in part.metrics.items()},
        notes=[note for part in every for note in part.notes],
    )

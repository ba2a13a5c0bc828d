"""A benchmark in parts: each is shown and kept as it ends, and can be run alone."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import msgspec

from benchmarks.ours.cluster import BenchmarkError
from benchmarks.table import Record, Table, write_record

_BY_PARTS = ", its parts one by one"


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """Rows for people, metrics for whoever checks."""

    rows: Sequence[Sequence[str]] = ()
    metrics: Mapping[str, float] = {}
    notes: Sequence[str] = ()


class Parts(msgspec.Struct, frozen=True, kw_only=True):
    """What a benchmark measures, one after another."""

    title: str
    columns: Sequence[str]
    parts: Mapping[str, Callable[[], Figures]]
    """By name; in this order."""
    notes: Callable[[], Sequence[str]] = tuple
    """On all of them: asked for behind the last."""


def measured(whole: Parts, names: Sequence[str], ended: Callable[[Table], None]) -> Table:
    """Measure some parts. What was never reached or broke is a note, not a figure.

    Args:
        whole: The benchmark.
        names: Of parts.
        ended: Given each part's table as soon as it is there.
    """
    found: list[Figures] = []
    for name in names:
        part = figures_of(name, whole.parts[name])
        ended(_table(f"{whole.title}: {name}", whole.columns, part))
        found.append(part)
    every = merged([*found, Figures(notes=whole.notes())])
    return _table(whole.title, whole.columns, every)


def _table(title: str, columns: Sequence[str], found: Figures) -> Table:
    return Table(
        title=title, columns=columns, rows=found.rows, metrics=found.metrics, notes=found.notes
    )


def merged(parts: Iterable[Figures]) -> Figures:
    """All parts, in order."""
    every = list(parts)
    return Figures(
        rows=[row for part in every for row in part.rows],
        metrics={key: value for part in every for key, value in part.metrics.items()},
        notes=[note for part in every for note in part.notes],
    )


def figures_of(name: str, part: Callable[[], Figures]) -> Figures:
    """A part's figures; what was never reached or broke is a note, not a figure."""
    try:
        return part()
    except BenchmarkError as missed:
        return Figures(notes=[f"MISSED, {name}: {missed}"])


def merge_record(record: Record, path: Path) -> None:
    """Write a part's metrics beside those of the other parts, if they are of the same effort.

    Args:
        record: Of the part, with the command for all of them.
        path: What another machine measured there, or a quick run, is written over.
    """
    metrics, known = record.metrics, {record.command, record.command + _BY_PARTS}
    if path.exists():
        before = msgspec.json.decode(path.read_bytes(), type=Record)
        if before.machine == record.machine and before.command in known:
            metrics = {**before.metrics, **metrics}
    write_record(Record(record.machine, record.command + _BY_PARTS, metrics), path)

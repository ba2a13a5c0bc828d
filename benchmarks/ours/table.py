"""The outcome of a benchmark: a table for people, rows for the results file, its parts."""

import platform
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import msgspec
import psutil
import rich.table
from msgspec.structs import asdict
from rich.console import Console

from benchmarks.ours.cluster import BenchmarkError


class ResultTable(msgspec.Struct, frozen=True, kw_only=True):
    """One benchmark's outcome. Rows hold text, formatted as a person wants to read it."""

    title: str
    columns: Sequence[str]
    """The first column names the row and is set left; the others are figures and are set right."""
    rows: Sequence[Sequence[str]]
    metrics: Mapping[str, float]
    notes: Sequence[str] = ()
    """Sizes, repeats, omissions: whatever a reader must know to trust the figures."""
    is_partial: bool = False
    """Whether a part of it brought no figures."""


class ResultRow(msgspec.Struct, frozen=True, kw_only=True):
    """One measured figure, as ``benchmarks/results`` keeps it."""

    key: str
    value: float
    date: str
    """Day of the run, as YYYY-MM-DD."""
    machine: str
    command: str


def print_table(table: ResultTable, console: Console) -> None:
    """Print a table with rules on a terminal, and as plain aligned columns elsewhere."""
    box = rich.box.ROUNDED if console.is_terminal else None
    drawn_table = rich.table.Table(title=table.title, title_justify="left", box=box, pad_edge=False)
    for position, column in enumerate(table.columns):
        drawn_table.add_column(column, justify="right" if position else "left", no_wrap=True)
    for row in table.rows:
        drawn_table.add_row(*row)
    console.print(drawn_table)
    for note in table.notes:
        console.print(note, style="dim", highlight=False)


def rows_of(metrics: Mapping[str, float], command: str, date: str) -> list[ResultRow]:
    """Return the rows of metrics that this machine measured."""
    here = machine()
    return [
        ResultRow(key=key, value=value, date=date, machine=here, command=command)
        for key, value in metrics.items()
    ]


def read_rows(path: Path) -> list[ResultRow]:
    """Return the rows of a results file; none where there is no file."""
    return msgspec.json.decode(path.read_bytes(), type=list[ResultRow]) if path.exists() else []


def merge_rows(rows: Sequence[ResultRow], path: Path) -> None:
    """Write rows beside those that the file has of other keys."""
    rows_by_key = {row.key: row for row in (*read_rows(path), *rows)}
    write_rows(list(rows_by_key.values()), path)


def write_rows(rows: Sequence[ResultRow], path: Path) -> None:
    """Replace a results file: indented JSON with a final newline."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(msgspec.json.format(msgspec.json.encode(rows), indent=2) + b"\n")


def machine() -> str:
    """Describe the machine: processor, cores, memory, system and Python."""
    gigabytes = round(psutil.virtual_memory().total / 1e9)
    return (
        f"{processor()}, {psutil.cpu_count()} cores, {gigabytes} GB, "
        f"{platform.system()} {platform.machine()}, Python {platform.python_version()}"
    )


def processor() -> str:
    """Return the processor's name where the system tells it."""
    processor_file = Path("/proc/cpuinfo")
    lines = (
        processor_file.read_text(encoding="utf-8").splitlines() if processor_file.exists() else []
    )
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or "unknown processor"


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
    figures: list[PartFigures] = []
    for name in names:
        part = measure_part(name, whole.parts[name])
        show(
            ResultTable(
                title=f"{whole.title}: {name}",
                columns=whole.columns,
                is_partial=True,
                **asdict(part),
            )
        )
        figures.append(part)
    every = merge_figures([*figures, PartFigures(notes=whole.notes())])
    is_partial = {*names} != {*whole.parts} or any(note.startswith(_MISSED) for note in every.notes)
    return ResultTable(
        title=whole.title, columns=whole.columns, is_partial=is_partial, **asdict(every)
    )


def measure_part(name: str, part: Callable[[], PartFigures]) -> PartFigures:
    """Measure one part. Where it breaks, a note says so and there is no figure."""
    try:
        return part()
    except BenchmarkError as error:
        return PartFigures(notes=[f"{_MISSED} {name}: {error}"])


def merge_figures(parts: Iterable[PartFigures]) -> PartFigures:
    """Join the figures of parts, in order."""
    every = list(parts)
    return PartFigures(
        rows=[row for part in every for row in part.rows],
        metrics={key: value for part in every for key, value in part.metrics.items()},
        notes=[note for part in every for note in part.notes],
    )

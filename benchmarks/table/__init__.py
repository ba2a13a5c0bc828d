"""What a benchmark returns: a table for people, and metrics for whoever checks our claims."""

import platform
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
import psutil
import rich.table
from rich.console import Console


class Table(msgspec.Struct, frozen=True, kw_only=True):
    """One benchmark's outcome. Rows hold text, formatted as a person wants to read it."""

    title: str
    columns: Sequence[str]
    """The first column names the row and is set left; the others are figures and are set right."""
    rows: Sequence[Sequence[str]]
    metrics: Mapping[str, float]
    notes: Sequence[str] = ()
    """What a reader must know to trust the figures: sizes, repeats, what was left out."""


class Record(msgspec.Struct, frozen=True):
    """The file that a benchmark leaves in ``benchmarks/results``."""

    machine: str
    command: str
    metrics: Mapping[str, float]


def print_table(table: Table, console: Console) -> None:
    """Print a table with rules on a terminal, and as plain aligned columns elsewhere."""
    box = rich.box.ROUNDED if console.is_terminal else None
    drawn = rich.table.Table(title=table.title, title_justify="left", box=box, pad_edge=False)
    for position, column in enumerate(table.columns):
        drawn.add_column(column, justify="right" if position else "left", no_wrap=True)
    for row in table.rows:
        drawn.add_row(*row)
    console.print(drawn)
    for note in table.notes:
        console.print(note, style="dim", highlight=False)


def write_record(record: Record, path: Path) -> None:
    """Write the metrics as indented JSON with a final newline."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = msgspec.json.format(msgspec.json.encode(record), indent=2)
    path.write_bytes(text + b"\n")


def machine() -> str:
    """Describe the machine: processor, cores, memory, system and Python."""
    gigabytes = round(psutil.virtual_memory().total / 1e9)
    return (
        f"{processor()}, {psutil.cpu_count()} cores, {gigabytes} GB, "
        f"{platform.system()} {platform.machine()}, Python {platform.python_version()}"
    )


def processor() -> str:
    """Return the processor's name where the system tells it."""
    listing = Path("/proc/cpuinfo")
    lines = listing.read_text(encoding="utf-8").splitlines() if listing.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or "unknown processor"

"""What a command writes: plain text, numbers, JSON, tables and progress bars when a person is
looking.

Results go to stdout and nothing else does; notes and errors go to stderr.
"""

import contextlib
import itertools
import os
import shutil
import sys
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple, TextIO

if TYPE_CHECKING:
    import msgspec

    from hypergpu.user.client.resume import ReportProgress


def size(count: int) -> str:
    """Bytes, in the unit that leaves at most four digits."""
    if count < 1000:
        return f"{count} B"
    value = float(count)
    for unit in ("kB", "MB", "GB", "TB"):
        value /= 1000
        if value < 999.5 or unit == "TB":
            return f"{value:.3g} {unit}" if value < 100 else f"{value:.0f} {unit}"
    return f"{count} B"


def amount_text(units: int, decimals: int) -> str:
    """Money in whole tokens, exactly: ``12.5``; in smallest units where decimals are 0."""
    whole, rest = divmod(abs(units), 10**decimals)
    digits = str(rest).rjust(decimals, "0").rstrip("0") if rest else ""
    return f"{'-' if units < 0 else ''}{whole:,}{'.' + digits if digits else ''}"


def span(seconds: float) -> str:
    """A duration."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    if seconds < 120:
        return f"{seconds:.0f} s"
    minutes, rest = divmod(int(seconds), 60)
    if minutes < 120:
        return f"{minutes} min {rest:02d} s"
    hours, minutes = divmod(minutes, 60)
    if hours < 48:
        return f"{hours} h {minutes:02d} min"
    return f"{hours // 24} d {hours % 24} h"


def milliseconds(value_us: float) -> str:
    """A short time, to three digits."""
    return f"{value_us / 1000:.3g} ms" if value_us < 1e6 else span(value_us / 1e6)


def mbit_s(bits_per_s: float) -> str:
    """A rate in Mbit/s, without its unit."""
    value = bits_per_s / 1e6
    return f"{value:.3g}" if value < 999.5 else f"{value:.0f}"


def percent(share: float) -> str:
    """A share, small ones to two digits."""
    return f"{share * 100:.2g} %" if share < 0.1 else f"{share:.0%}"


def short_id(name: str) -> str:
    """The beginning of a job's or node's id that commands take for the whole."""
    return name[: (4 if name.startswith("job-") else 2) + 8]


def name_or_id(name: str, identifier: str) -> str:
    """What a person calls it; where nobody named it, its short id."""
    return name or short_id(identifier)


BAR_WIDTH = 18


def bar(done: int, total: int, width: int = BAR_WIDTH) -> str:
    """A bar of fixed width."""
    filled_width = min(width, done * width // total) if total > 0 else 0
    return "\u2501" * filled_width + "\u2500" * (width - filled_width)


_GAP = "  "
_FOLD_LEAST = 18
"""A column that folds is never narrower."""


_FOLD_ROOM = 28
"""No further column is shown where that made a column that folds narrower than this."""


class Column(NamedTuple):
    """A table's column; numbers are aligned to the right."""

    title: str
    is_number: bool = False
    folds: bool = False
    """Its cells may be broken where a terminal is too narrow: sentences, never names."""
    is_optional: bool = False
    """Left out, the last first, where a terminal has no room for it."""


def numbers(*titles: str) -> tuple[Column, ...]:
    """Columns of numbers."""
    return tuple(Column(title, is_number=True) for title in titles)


def optional_numbers(*titles: str) -> tuple[Column, ...]:
    """Columns of numbers that a narrow terminal has no room for."""
    return tuple(Column(title, is_number=True, is_optional=True) for title in titles)


Table = tuple[Sequence[Column], Sequence[Sequence[str]]]
"""Columns and rows."""


def is_rich(stream: TextIO | None = None) -> bool:
    """Whether stdout, or another, is a terminal whose owner has not asked for plain text."""
    is_dumb = os.environ.get("TERM") in ("dumb", "unknown")
    is_terminal = (stream or sys.stdout).isatty()
    return is_terminal and not os.environ.get("NO_COLOR") and not is_dumb


def say(text: str = "") -> None:
    """One line of the result, at once visible to whoever reads the pipe."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def note(text: str) -> None:
    """One line for the person, not for the pipe."""
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


def confirm(question: str, *, yes: bool) -> None:
    """Ask before something that cannot be undone; ``yes`` has answered already.

    Raises:
        HyperGPUError: ARGUMENT_INVALID, nobody is there to answer.
    """
    import typer

    from hypergpu.errors import HyperGPUError, Reason

    if yes:
        return
    if not sys.stdin.isatty():
        detail = f"{question} Nobody is there to answer"
        raise HyperGPUError(Reason.ARGUMENT_INVALID, detail, fix="answer beforehand: --yes")
    if not typer.confirm(question):
        raise typer.Exit(1)


def say_json(struct: "msgspec.Struct") -> None:
    """One JSON value, indented for people and still one document."""
    import msgspec

    say(msgspec.json.format(msgspec.json.encode(struct), indent=2).decode("utf-8"))


def say_json_line(struct: "msgspec.Struct") -> None:
    """One JSON value on one line, for streams."""
    import msgspec

    say(msgspec.json.encode(struct).decode("utf-8"))


def say_table(columns: Sequence[Column], rows: Iterable[Sequence[str]], *, empty: str) -> None:
    """Print a table, or the sentence ``empty`` when there are no rows."""
    cells = list(rows)
    if not cells:
        lines = [empty]
    elif is_rich() or os.environ.get("COLUMNS", "").isdecimal():
        # Whoever sets COLUMNS for a pipe wants a table of that width.
        lines = table_lines(columns, cells, shutil.get_terminal_size().columns)
    else:
        lines = plain_table(columns, cells)
    for line in lines:
        say(line)


def table_lines(columns: Sequence[Column], rows: Sequence[Sequence[str]], width: int) -> list[str]:
    """A table for a terminal of that width.

    Columns that folding makes fit are folded; optional columns are left out, the last first. Where
    the others do not fit, each row is a block of lines.
    """
    widths = _widths(columns, rows)
    least = [
        min(wide, max(_FOLD_LEAST, len(column.title))) if column.folds else wide
        for wide, column in zip(widths, columns, strict=True)
    ]
    shown_columns = [at for at, column in enumerate(columns) if not column.is_optional]
    if _sum(least, shown_columns) > width:
        return _block_lines(columns, rows, width)
    roomy = [
        max(each, min(wide, _FOLD_ROOM)) if column.folds else each
        for each, wide, column in zip(least, widths, columns, strict=True)
    ]
    for at in range(len(columns)):
        if at not in shown_columns and _sum(roomy, [*shown_columns, at]) <= width:
            shown_columns.append(at)
    shown_columns.sort()
    spare = width - _sum(least, shown_columns)
    for at in shown_columns:
        added_width = min(widths[at] - least[at], spare)
        least[at] += added_width
        spare -= added_width
    return _folded_lines(
        [columns[at] for at in shown_columns], rows, {at: least[at] for at in shown_columns}
    )


def _widths(columns: Sequence[Column], rows: Sequence[Sequence[str]]) -> list[int]:
    return [
        max(len(column.title), *(len(row[at]) for row in rows)) for at, column in enumerate(columns)
    ]


def _sum(widths: Sequence[int], shown: Sequence[int]) -> int:
    return sum(widths[at] for at in shown) + len(_GAP) * (len(shown) - 1)


def _folded_lines(
    columns: Sequence[Column], rows: Sequence[Sequence[str]], widths: Mapping[int, int]
) -> list[str]:
    lines = []
    titles = {at: column.title for at, column in zip(widths, columns, strict=True)}
    for cells in [titles, *({at: row[at] for at in widths} for row in rows)]:
        folded_cells = [
            textwrap.wrap(cells[at], wide, break_on_hyphens=False) or [""]
            for at, wide in widths.items()
        ]
        for parts in itertools.zip_longest(*folded_cells, fillvalue=""):
            padded_parts = [
                part.rjust(wide) if column.is_number else part.ljust(wide)
                for part, wide, column in zip(parts, widths.values(), columns, strict=True)
            ]
            lines.append(_GAP.join(padded_parts).rstrip())
    return lines


def _block_lines(columns: Sequence[Column], rows: Sequence[Sequence[str]], width: int) -> list[str]:
    """Each row as a block: the first cell, then a line for each other cell that says something."""
    wide = max(len(column.title) for column in columns) + 2
    lines = []
    for row in rows:
        for at, (column, cell) in enumerate(zip(columns, row, strict=True)):
            if at == 0 or cell not in ("", "-"):
                title = f"{'  ' if at else ''}{column.title}".ljust(wide) + _GAP
                lines += textwrap.wrap(
                    cell,
                    max(width, len(title) + _FOLD_LEAST),
                    initial_indent=title,
                    subsequent_indent=" " * len(title),
                    break_on_hyphens=False,
                )
    return lines


def plain_table(columns: Sequence[Column], rows: Sequence[Sequence[str]]) -> list[str]:
    """Rows under their titles in aligned columns, as wide as they are."""
    titled_columns = [column._replace(title=column.title.upper()) for column in columns]
    return _folded_lines(titled_columns, rows, dict(enumerate(_widths(titled_columns, rows))))


@contextlib.contextmanager
def progress_note(text: str) -> Iterator[None]:
    """Say what is being done while the block runs."""
    if not is_rich(sys.stderr):
        yield
        return
    from rich.console import Console

    with Console(stderr=True).status(text):
        yield


@contextlib.contextmanager
def progress_bars() -> "Iterator[ReportProgress]":
    """Show a bar for each step that is reported while the block runs."""
    if not is_rich(sys.stderr):
        yield lambda _step, _done, _total: None
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TaskID,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True)) as progress:
        tasks: dict[str, TaskID] = {}

        def report(step: str, done: int, total: int) -> None:
            if step not in tasks:
                tasks[step] = progress.add_task(step, total=None)
            progress.update(tasks[step], completed=done, total=total)

        yield report

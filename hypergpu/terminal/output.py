"""What a command writes: plain text, JSON, or rich tables when a person is looking.

Results go to stdout and nothing else does; notes and errors go to stderr.
"""

import os
import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple, TextIO

import msgspec

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table


class Column(NamedTuple):
    """A table's column; numbers are aligned to the right."""

    title: str
    is_number: bool = False
    folds: bool = False
    """Its cells may be broken where a terminal is too narrow: names, which nobody copies."""


def is_rich(stream: TextIO | None = None) -> bool:
    """Whether stdout, or another, is a terminal whose owner has not asked for plain text."""
    is_dumb = os.environ.get("TERM") in ("dumb", "unknown")
    is_terminal = (stream or sys.stdout).isatty()
    return is_terminal and not os.environ.get("NO_COLOR") and not is_dumb


def console() -> "Console":
    """A rich console on stdout."""
    from rich.console import Console

    return Console(highlight=False)


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


def say_json(struct: msgspec.Struct) -> None:
    """One JSON value, indented for people and still one document."""
    say(msgspec.json.format(msgspec.json.encode(struct), indent=2).decode("utf-8"))


def say_json_line(struct: msgspec.Struct) -> None:
    """One JSON value on one line, for streams."""
    say(msgspec.json.encode(struct).decode("utf-8"))


def say_table(columns: Sequence[Column], rows: Iterable[Sequence[str]], *, empty: str) -> None:
    """A table, or the sentence ``empty`` when there are no rows."""
    kept = [tuple(row) for row in rows]
    if not kept:
        say(empty)
    elif is_rich():
        console().print(rich_table(columns, kept))
    else:
        for line in plain_table(columns, kept):
            say(line)


def say_whole_table(
    columns: Sequence[Column], rows: Iterable[Sequence[str]], *, empty: str
) -> None:
    """A table of which no terminal cuts anything, or the sentence ``empty`` when it has no rows.

    Where a terminal is too narrow names are folded; where that does not help, each row is told by
    itself, a line for each column.
    """
    kept = [tuple(row) for row in rows]
    if not kept:
        say(empty)
    elif not is_rich():
        for line in plain_table(columns, kept):
            say(line)
    elif _least_width(columns, kept) <= (on := console()).width:
        on.print(_folding_table(columns, kept))
    else:
        for line in _row_by_row(columns, kept):
            say(line)


def _least_width(columns: Sequence[Column], rows: Sequence[Sequence[str]]) -> int:
    """Of a table whose columns are two spaces apart, as narrow as folding makes it."""
    widths = [
        max(len(column.title), *(0 if column.folds else len(row[at]) for row in rows))
        for at, column in enumerate(columns)
    ]
    return sum(widths) + 2 * (len(widths) - 1)


def _row_by_row(columns: Sequence[Column], rows: Sequence[Sequence[str]]) -> list[str]:
    wide = max(len(column.title) for column in columns) + 2
    return [
        f"{column.title.ljust(wide) if at else f'- {column.title}'.ljust(wide)}  {cell}"
        for row in rows
        for at, (column, cell) in enumerate(zip(columns, row, strict=True))
        if cell
    ]


def plain_table(columns: Sequence[Column], rows: Sequence[Sequence[str]]) -> list[str]:
    """Rows under their titles in aligned columns, two spaces apart."""
    cells = [[column.title.upper() for column in columns], *[list(row) for row in rows]]
    widths = [max(len(row[at]) for row in cells) for at in range(len(columns))]
    lines = []
    for row in cells:
        padded = [
            cell.rjust(width) if column.is_number else cell.ljust(width)
            for cell, width, column in zip(row, widths, columns, strict=True)
        ]
        lines.append("  ".join(padded).rstrip())
    return lines


def _folding_table(columns: Sequence[Column], rows: Sequence[Sequence[str]]) -> "Table":
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0), pad_edge=False)
    for column in columns:
        table.add_column(
            column.title,
            justify="right" if column.is_number else "left",
            no_wrap=not column.folds,
            overflow="fold",
        )
    return _filled(table, rows)


def rich_table(columns: Sequence[Column], rows: Sequence[Sequence[str]]) -> "Table":
    """The same rows for a terminal."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for at, column in enumerate(columns):
        is_last = at == len(columns) - 1
        table.add_column(
            column.title,
            justify="right" if column.is_number else "left",
            no_wrap=not is_last,
            overflow="ellipsis",
        )
    return _filled(table, rows)


def _filled(table: "Table", rows: Sequence[Sequence[str]]) -> "Table":
    from rich.text import Text

    for row in rows:
        table.add_row(*[Text(cell) for cell in row])
    return table

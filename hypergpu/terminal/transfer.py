"""Progress of what takes a while: a bar on a terminal, nothing in a pipe."""

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from hypergpu.terminal.output import is_rich

if TYPE_CHECKING:
    from rich.progress import ProgressColumn

Shown = Callable[[int, int], None]
"""Takes the bytes, or what else is counted, that there are and that there will be."""


def _unseen(_done: int, _total: int) -> None:
    """A pipe gets results only."""


@contextlib.contextmanager
def transfer(what: str) -> Iterator[Shown]:
    """Show a transfer named ``what`` while the block runs."""
    if not is_rich(sys.stderr):
        yield _unseen
        return
    from rich.progress import DownloadColumn, TransferSpeedColumn

    with _bar(what, DownloadColumn(), TransferSpeedColumn()) as shown:
        yield shown


@contextlib.contextmanager
def counted(what: str) -> Iterator[Shown]:
    """Show how far something named ``what`` is while the block runs."""
    if not is_rich(sys.stderr):
        yield _unseen
        return
    from rich.progress import MofNCompleteColumn

    with _bar(what, MofNCompleteColumn()) as shown:
        yield shown


@contextlib.contextmanager
def _bar(what: str, *columns: "ProgressColumn") -> Iterator[Shown]:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    named, left = TextColumn("{task.description}"), TimeRemainingColumn()
    console = Console(stderr=True)
    with Progress(named, BarColumn(), *columns, left, console=console) as progress:
        task = progress.add_task(what, total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)

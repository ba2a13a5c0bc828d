"""Progress bars of what takes a while, on a terminal; nothing in a pipe."""

import contextlib
import sys
from collections.abc import Callable, Iterator

from hypergpu.terminal.output import is_rich

Report = Callable[[str, int, int], None]
"""Takes a step's name, what is done of it and what there is of it."""


@contextlib.contextmanager
def progress_bars(*, counts_bytes: bool = True) -> Iterator[Report]:
    """Show a bar for each step that is reported while the block runs."""
    if not is_rich(sys.stderr):
        yield lambda _step, _done, _total: None
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        MofNCompleteColumn,
        Progress,
        TaskID,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    amounts = (DownloadColumn(), TransferSpeedColumn()) if counts_bytes else (MofNCompleteColumn(),)
    columns = (TextColumn("{task.description}"), BarColumn(), *amounts, TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        tasks: dict[str, TaskID] = {}

        def report(step: str, done: int, total: int) -> None:
            if step not in tasks:
                tasks[step] = progress.add_task(step, total=None)
            progress.update(tasks[step], completed=done, total=total)

        yield report


@contextlib.contextmanager
def step_bar(step: str) -> Iterator[Callable[[int, int], None]]:
    """Show how far one step is while the block runs, in things instead of bytes."""
    with progress_bars(counts_bytes=False) as report:
        yield lambda done, total: report(step, done, total)

"""Progress bars of what takes a while, on a terminal; nothing in a pipe."""

import contextlib
import sys
from collections.abc import Callable, Iterator

from hypergpu.terminal.output import is_rich

Report = Callable[[str, int, int], None]
"""Takes a step's name, what is done of it and what there is of it."""


@contextlib.contextmanager
def progress_bars() -> Iterator[Report]:
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

"""Progress of a transfer: a bar on a terminal, nothing in a pipe."""

import contextlib
from collections.abc import Callable, Iterator

from hypergpu.cli.output import is_rich

Shown = Callable[[int, int], None]
"""Takes the bytes there are and the bytes there will be."""


def _unseen(_done: int, _total: int) -> None:
    """A pipe gets results only."""


@contextlib.contextmanager
def transfer(what: str) -> Iterator[Shown]:
    """Show a transfer named ``what`` while the block runs."""
    if not is_rich():
        yield _unseen
        return
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
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
    with Progress(*columns) as progress:
        task = progress.add_task(what, total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)

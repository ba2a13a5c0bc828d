"""A bar of items for a terminal or notebook; nothing where nobody looks."""

import contextlib
import sys
from collections.abc import Callable, Iterator

from hypergpu.user.terminal.output import is_rich

ReportItems = Callable[[int, int, str], None]
"""Takes the items that are done, those there are, and a few words."""


@contextlib.contextmanager
def item_progress(title: str) -> Iterator[ReportItems]:
    """Show a bar while the block runs.

    Args:
        title: What the items belong to.
    """
    if not (is_rich(sys.stderr) or _is_notebook()):
        yield lambda _done, _total, _text: None
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TaskID,
        TextColumn,
        TimeRemainingColumn,
    )

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[words]}"),
    )
    console = None if _is_notebook() else Console(stderr=True)
    with Progress(*columns, console=console) as progress:
        task: TaskID = progress.add_task(title, total=None, words="")
        yield lambda items_done, items, words: progress.update(
            task, completed=items_done, total=items, words=words
        )


def _is_notebook() -> bool:
    """Whether a notebook shows what is printed."""
    return "ipykernel" in sys.modules

"""Uploads whose bytes are being checked."""

import asyncio
from collections.abc import Callable, Coroutine


class Commits:
    """Uploads that are being checked: a caller that goes away ends none, and another one waits."""

    def __init__(self) -> None:
        self._tasks: dict[str, asyncio.Task[None]] = {}

    async def run(self, upload: str, commit: Callable[[], Coroutine[None, None, None]]) -> None:
        """Commit an upload, or wait for whoever does. Raises what the commit raises."""
        task = self._tasks.get(upload)
        if task is None:
            task = self._tasks[upload] = asyncio.create_task(commit(), name="commit")
            task.add_done_callback(lambda done: self._end(upload, done))
        await asyncio.shield(task)

    async def wait(self, upload: str) -> None:
        """Wait until the upload is not being committed, whatever comes of it."""
        if (task := self._tasks.get(upload)) is not None:
            await asyncio.wait([task])

    def _end(self, upload: str, done: "asyncio.Task[None]") -> None:
        del self._tasks[upload]
        if not done.cancelled():
            done.exception()

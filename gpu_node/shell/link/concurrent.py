"""Tasks that start and end with a block of code."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Coroutine


@contextlib.asynccontextmanager
async def run_alongside(*coroutines: Coroutine[None, None, None]) -> AsyncIterator[None]:
    """Run coroutines alongside the body and end them with it. An error of one ends the body too."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(coroutine) for coroutine in coroutines]
            yield
            for task in tasks:
                task.cancel()
    except BaseExceptionGroup as broken:
        # The caller expects the error, not a group of it.
        raise broken.exceptions[0] from None

"""Tasks that live and end with a block of code."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Coroutine


@contextlib.asynccontextmanager
async def beside(*coroutines: Coroutine[None, None, None]) -> AsyncIterator[None]:
    """Run coroutines beside the body and end them with it. What breaks one breaks the body too."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(coroutine) for coroutine in coroutines]
            yield
            for task in tasks:
                task.cancel()
    except BaseExceptionGroup as broken:
        # Whoever holds the block expects what broke, not a group of it.
        raise broken.exceptions[0] from None

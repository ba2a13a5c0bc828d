"""Coroutines that run beside each other and end together."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Coroutine, Sequence
from typing import TypeVar


@contextlib.asynccontextmanager
async def run_alongside(*coroutines: Coroutine[None, None, None]) -> AsyncIterator[None]:
    """Run coroutines alongside the body and end them with it. An error of one ends the body too."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(coroutine) for coroutine in coroutines]
            yield
            for task in tasks:
                task.cancel()
    except BaseExceptionGroup as error:
        # The caller expects the error, not a group of it.
        raise error.exceptions[0] from None


_Answer = TypeVar("_Answer")


async def gather_or_cancel(calls: Sequence[Awaitable[_Answer]]) -> list[_Answer]:
    """All answers; the first failure ends the calls that are still under way."""
    tasks = [asyncio.ensure_future(call) for call in calls]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

"""Several calls at once, of which the first failure ends the others."""

import asyncio
from collections.abc import Awaitable, Sequence
from typing import TypeVar

Answer = TypeVar("Answer")


async def gather_or_cancel(calls: Sequence[Awaitable[Answer]]) -> list[Answer]:
    """All answers; the first failure ends the calls that are still under way."""
    tasks = [asyncio.ensure_future(call) for call in calls]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

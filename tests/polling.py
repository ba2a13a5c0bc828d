"""Waits for what a process tells only where it is asked: with a pause between two questions.

Asked without one, it answers a thousand times a second, by the cores that the change needs.
"""

import asyncio
import threading
from collections.abc import Awaitable, Callable
from typing import TypeVar

ASK_EVERY_S = 0.02
Answer = TypeVar("Answer")


def first_true(ask: Callable[[], Answer]) -> Answer:
    """The first answer that is true, as truth goes in conditions."""
    while not (answer := ask()):
        threading.Event().wait(ASK_EVERY_S)
    return answer


async def first_true_of(ask: Callable[[], Awaitable[Answer]]) -> Answer:
    """See `first_true`; other tasks go on meanwhile."""
    while not (answer := await ask()):  # noqa: ASYNC110 - the change is in another process
        await asyncio.sleep(ASK_EVERY_S)
    return answer

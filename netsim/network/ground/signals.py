"""What asks a program to end, while links are open: nothing may be left behind by it."""

import asyncio
import os
import signal
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

T = TypeVar("T")
NUMBERS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_is_completing: ContextVar[bool] = ContextVar("is_completing", default=False)


class SignalledError(Exception):
    """A signal ended the work; everything that it had opened is gone again."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.status = 128 + number
        """As shells show it."""


def completed(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end; the first signal cancels it, and those after it are ignored.

    Raises:
        SignalledError: It was cancelled.
    """
    return asyncio.run(_completed(work))


async def _completed(work: Coroutine[Any, Any, T]) -> T:
    _is_completing.set(True)
    task = asyncio.ensure_future(work)
    came: list[int] = []

    def cancel(number: int) -> None:
        if not came:
            came.append(number)
            task.cancel()

    with received(cancel):
        try:
            return await task
        except asyncio.CancelledError:
            if came:
                raise SignalledError(came[0]) from None
            raise


@contextmanager
def received(receiver: Callable[[int], None]) -> Iterator[None]:
    """Give signals to a receiver while the block runs."""
    loop = asyncio.get_running_loop()
    for number in NUMBERS:
        loop.add_signal_handler(number, receiver, number)
    try:
        yield
    finally:
        for number in NUMBERS:
            if _is_completing.get():
                # What comes next removes what was opened, which nothing may break off.
                loop.add_signal_handler(number, _ignore)
            else:
                loop.remove_signal_handler(number)


def _ignore() -> None:
    """Ending already."""


def is_terminals(number: int) -> bool:
    """Whether a signal is a terminal's Ctrl-C, which every program in its foreground gets."""
    return number == signal.SIGINT and any(_is_foreground(each) for each in range(3))


def _is_foreground(descriptor: int) -> bool:
    try:
        return os.tcgetpgrp(descriptor) == os.getpgrp()
    except OSError:
        return False

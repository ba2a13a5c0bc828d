"""Signals that ask a program to end while links are open: nothing may be left behind by them."""

import asyncio
import os
import signal
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

_Result = TypeVar("_Result")
_NUMBERS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_is_completing: ContextVar[bool] = ContextVar("is_completing", default=False)


def run_to_end(work: Coroutine[Any, Any, _Result]) -> _Result:
    """Run a coroutine to its end; the first signal cancels it, and later ones are ignored.

    Raises:
        SystemExit: A signal cancelled it; the status is 128 and its number, as in shells.
    """
    return asyncio.run(_complete(work))


async def _complete(work: Coroutine[Any, Any, _Result]) -> _Result:
    _is_completing.set(True)
    task = asyncio.ensure_future(work)
    received: list[int] = []

    def cancel(number: int) -> None:
        if not received:
            received.append(number)
            task.cancel()

    with receiving_signals(cancel):
        try:
            return await task
        except asyncio.CancelledError:
            if received:
                raise SystemExit(128 + received[0]) from None
            raise


@contextmanager
def receiving_signals(receiver: Callable[[int], None]) -> Iterator[None]:
    """Pass signals to a receiver for the block."""
    loop = asyncio.get_running_loop()
    for number in _NUMBERS:
        loop.add_signal_handler(number, receiver, number)
    try:
        yield
    finally:
        for number in _NUMBERS:
            if _is_completing.get():
                # The code after the block removes what was opened, which nothing may interrupt.
                loop.add_signal_handler(number, _ignore)
            else:
                loop.remove_signal_handler(number)


def _ignore() -> None:
    """Do nothing: the program is ending already."""


def is_from_terminal(number: int) -> bool:
    """Whether a signal may be Ctrl-C, which every program in a terminal's foreground gets."""
    return number == signal.SIGINT and any(_is_foreground(each) for each in range(3))


def _is_foreground(descriptor: int) -> bool:
    try:
        return os.tcgetpgrp(descriptor) == os.getpgrp()
    except OSError:
        return False

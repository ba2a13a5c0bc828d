"""A thread of one's own for what talks netlink inside a namespace."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

Result = TypeVar("Result")


def apart(work: Callable[[], Result]) -> Result:
    """Do it in a fresh thread and wait.

    pyroute2 drives the event loop of its thread and fails where that runs already, as it does in
    every coroutine. A namespace is entered by one thread, and this one is nobody else's.
    """
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(work).result()

"""The time that links run on: deeds are done in their order, each at the moment that was asked for.

A deed sees that moment, not the later one at which the loop came to it: a loop that wakes late
delays what it writes then, and nothing after it.
"""

import asyncio
import ctypes
import heapq
import os
import time
from collections.abc import Callable
from typing import Protocol

from hypergpu.units import Microseconds

Deed = Callable[[], None]


class FlowClock(Protocol):
    """Deeds are done in the order of their moments, and see their own moment as the present."""

    now_us: Microseconds
    """Since the clock was made."""

    def at(self, due_us: int, deed: Deed) -> None:
        """Plan a deed; one in the past is done at once, after those before it."""


_CLOCK_MONOTONIC = 1
_ABSOLUTE = 1
_AT_A_TIME = 500
"""Deeds before sockets are looked at again."""


class _TimeSpec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class _TimerSpec(ctypes.Structure):
    _fields_ = (("interval", _TimeSpec), ("value", _TimeSpec))


class Alarm:
    """One moment at which a deed is done; setting another moment forgets the first.

    Linux's timerfd, which an epoll loop waits for like for any file and which rounds nothing up,
    where ``call_at`` is half a millisecond late on average.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, deed: Callable[[], None]) -> None:
        self._loop = loop
        self._deed = deed
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._spec = _TimerSpec()
        self._file = self._libc.timerfd_create(_CLOCK_MONOTONIC, os.O_NONBLOCK | os.O_CLOEXEC)
        if self._file < 0:
            number = ctypes.get_errno()
            raise OSError(number, f"timerfd_create: {os.strerror(number)}")
        loop.add_reader(self._file, self._ring_alarm)

    def set(self, at_us: Microseconds) -> None:
        """Ring at ``at_us`` of the monotonic clock; at once when that is past."""
        seconds, left_us = divmod(max(at_us, 1), 1_000_000)
        self._spec.value.seconds = seconds
        self._spec.value.nanoseconds = left_us * 1000
        self._libc.timerfd_settime(self._file, _ABSOLUTE, ctypes.byref(self._spec), None)

    def close(self) -> None:
        """Give the file back."""
        if self._file >= 0:
            self._loop.remove_reader(self._file)
            os.close(self._file)
            self._file = -1

    def _ring_alarm(self) -> None:
        try:
            os.read(self._file, 8)
        except BlockingIOError:
            return  # it was set to a later moment in between
        self._deed()


class LoopClock:
    """A heap of deeds on an event loop. Time begins at 0 when it is made."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._start_us = time.monotonic_ns() // 1000
        self.now_us = Microseconds(0)
        self._alarm = Alarm(loop, self._ring)
        self._set_to_us: int | None = None
        self._heap: list[tuple[int, int, Deed]] = []
        self._asked = 0

    def at(self, due_us: int, deed: Deed) -> None:
        """Plan a deed; one in the past is done at once, after those before it."""
        heapq.heappush(self._heap, (due_us, self._asked, deed))
        self._asked += 1
        if self._set_to_us is None or due_us < self._set_to_us:
            self._set_to_us = due_us
            self._alarm.set(Microseconds(self._start_us + due_us))

    def wall_us(self) -> Microseconds:
        """The present, whatever deed is being done."""
        return Microseconds(time.monotonic_ns() // 1000 - self._start_us)

    def catch_up(self) -> None:
        """Do what is due, then the present is now: what a socket's event begins with."""
        wall_us = self.wall_us()
        for _ in range(_AT_A_TIME):
            if not self._heap or self._heap[0][0] > wall_us:
                break
            due_us, _, deed = heapq.heappop(self._heap)
            self.now_us = Microseconds(due_us)
            deed()
        self.now_us = wall_us

    def close(self) -> None:
        """Forget everything that was planned."""
        self._heap.clear()
        self._alarm.close()

    def _ring(self) -> None:
        # Deeds that plan deeds must not set the alarm each; it is set once, below.
        self._set_to_us = -1
        try:
            self.catch_up()
        finally:
            # A deed that fails must not stop the links of all the others.
            self._set_to_us = self._heap[0][0] if self._heap else None
            if self._set_to_us is not None:
                self._alarm.set(Microseconds(self._start_us + self._set_to_us))

"""Waking an event loop to the microsecond. A loop's own timers round up to whole milliseconds."""

import asyncio
import ctypes
import os
from collections.abc import Callable

from hypergpu.units import Microseconds

_CLOCK_MONOTONIC = 1
_ABSOLUTE = 1


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

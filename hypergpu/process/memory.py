"""How this process's C library keeps the memory of bulk messages between one and the next."""

import contextlib
import ctypes

_MMAP_THRESHOLD, _TRIM_THRESHOLD, _ARENA_MAX = -3, -1, -8
"""Parameters of glibc's `mallopt`."""
_LARGEST_KEPT_BYTES = 32 << 20
_IDLE_KEPT_BYTES = 64 << 20


def keep_bulk_memory() -> None:
    """Let freed bulk messages be used again at once; call it before threads start.

    By default glibc gives the memory of each half-megabyte message back to the system and takes
    fresh pages for the next one: measured, a third of what it costs to move a model. One arena
    serves all threads, so that what one frees another uses. Other C libraries are left alone.
    """
    with contextlib.suppress(AttributeError, OSError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_ARENA_MAX, 1)
        mallopt(_MMAP_THRESHOLD, _LARGEST_KEPT_BYTES)
        mallopt(_TRIM_THRESHOLD, _IDLE_KEPT_BYTES)

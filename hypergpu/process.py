"""What a coordinator's or a node's process sets up at its start: its logs, and what memory it
keeps.
"""

import contextlib
import ctypes
import logging
import sys

import structlog


def configure_logs(level: int | str = logging.INFO) -> None:
    """Set structlog up for this process; ``level`` is a number or a name such as ``info``."""
    is_terminal = sys.stderr.isatty()
    renderer: structlog.typing.Processor = (
        structlog.dev.ConsoleRenderer() if is_terminal else structlog.processors.JSONRenderer()
    )
    tracebacks: list[structlog.typing.Processor] = (
        [] if is_terminal else [structlog.processors.format_exc_info]
    )
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            *tracebacks,
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=structlog.PrintLoggerFactory(file=sys.stderr),
        cache_logger_on_first_use=True,
    )


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

"""What a coordinator's or a node's process sets up at its start: its logs, and what memory it
keeps.
"""

import contextlib
import ctypes
import gc
import logging
import os
import resource
import sys
import threading
from collections.abc import Callable
from logging.handlers import RotatingFileHandler
from pathlib import Path

import psutil
import structlog

from hypergpu.errors import HyperGPUError, Reason

_MEMORY_SIGNS = ("out of memory", "allocate memory", "bad_alloc", "not enough memory")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory was lacking, by its type or in a library's own words."""
    text = str(error).lower()
    return isinstance(error, MemoryError) or any(sign in text for sign in _MEMORY_SIGNS)


LOG_BYTES_MAX = 2_000_000
LOG_FILES_BEFORE = 4
"""Older files that a rotated log keeps, as long as the newest one."""


def configure_logs(
    level: int | str = logging.INFO,
    file: Path | None = None,
    limiter: structlog.typing.Processor | None = None,
) -> None:
    """Set structlog up for this process.

    Args:
        level: A number or a name such as ``info``.
        file: Gets JSON lines in place of standard error, and is rotated before it grows beyond
            LOG_BYTES_MAX. Warnings of libraries go there, too.
        limiter: Drops lines where there are too many of a kind.

    Raises:
        HyperGPUError: FILE_UNUSABLE, the file cannot be written.
    """
    is_terminal = file is None and sys.stderr.isatty()
    renderer: structlog.typing.Processor = structlog.processors.JSONRenderer()
    if is_terminal:
        renderer = structlog.dev.ConsoleRenderer(colors=not os.environ.get("NO_COLOR"))
    tracebacks: list[structlog.typing.Processor] = (
        [] if is_terminal else [structlog.processors.format_exc_info]
    )
    structlog.configure(
        processors=[
            *([] if limiter is None else [limiter]),
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            *tracebacks,
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=(
            structlog.PrintLoggerFactory(file=sys.stderr)
            if file is None
            else _rotated_log_factory(file)
        ),
    )


class _LossyHandler(RotatingFileHandler):
    """Loses lines where the disk takes none: a log ends no program."""

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 - logging's name
        """Say nothing: there is nowhere to say it."""


def _rotated_log_factory(file: Path) -> Callable[..., logging.Logger]:
    try:
        handler = _LossyHandler(
            file, maxBytes=LOG_BYTES_MAX, backupCount=LOG_FILES_BEFORE, encoding="utf-8"
        )
    except OSError as error:
        detail = f"the log {file} cannot be written: {error.strerror}"
        raise HyperGPUError(Reason.FILE_UNUSABLE, detail) from error
    logging.getLogger().addHandler(handler)
    logger = logging.getLogger("hypergpu")
    # Structlog has its own level.
    logger.setLevel(logging.DEBUG)
    return lambda *_: logger


_MMAP_THRESHOLD, _TRIM_THRESHOLD, _ARENA_MAX = -3, -1, -8
"""Parameters of glibc's `mallopt`."""
_LARGEST_KEPT_BYTES = 32 << 20
_IDLE_KEPT_BYTES = 64 << 20


_MAKES_WAY = 5


def make_way() -> None:
    """Let the calling thread, where the system has priorities of threads, go after all others."""
    with contextlib.suppress(OSError, AttributeError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _MAKES_WAY)


def raise_descriptor_limit() -> None:
    """Let this process and its children open as many files and sockets as the system allows."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def require_descriptors(count: int) -> None:
    """Let this process open so many files and sockets.

    Raises:
        HyperGPUError: LIMIT_REACHED, the system does not allow it.
    """
    raise_descriptor_limit()
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft not in (resource.RLIM_INFINITY, -1) and soft < count:
        detail = f"the system lets this process open {soft} files, and it needs {count}"
        fix = f"run `ulimit -n {count}` before it, or LimitNOFILE={count} in its systemd unit"
        raise HyperGPUError(Reason.LIMIT_REACHED, detail, fix=fix)


def memory_of(process_id: int) -> int:
    """Bytes of memory that a process and all that it started hold, pages of files aside, which the
    system takes back as it needs them. 0: there is no such process any more.
    """
    return sum(_held_bytes(each) for each in tree_of(process_id))


def _held_bytes(process: psutil.Process) -> int:
    try:
        lines = Path(f"/proc/{process.pid}/status").read_text("ascii").splitlines()
        fields = dict(line.split(":", 1) for line in lines)
        return sum(int(fields[name].split()[0]) << 10 for name in ("RssAnon", "RssShmem"))
    except (OSError, KeyError, ValueError):
        pass
    try:
        return int(process.memory_info().rss)
    except psutil.Error:
        return 0


def tree_of(process_id: int) -> list[psutil.Process]:
    """A process with all that it started, those that are there."""
    try:
        process = psutil.Process(process_id)
        return [process, *process.children(recursive=True)]
    except psutil.Error:
        return []


_COLLECT_AFTER = (20_000, 10, 5)
"""Objects more than at the last look, and looks of each kind before one that goes further: a
million small objects at worst, some 100 MB.
"""


def collect_seldom() -> None:
    """Look for unreachable cycles seldom.

    A process of thousands of streams makes few cycles, and each look goes through what the streams
    hold: a sixth of a coordinator's CPU while they come back.
    """
    gc.set_threshold(*_COLLECT_AFTER)


def keep_bulk_memory() -> None:
    """Let freed pieces of bulk be used again at once; call it before threads start.

    By default glibc gives the memory of each large piece back to the system and takes fresh pages
    for the next one: measured, a third of what it cost to move a model by messages. One arena
    serves all threads, so that what one frees another uses. Other C libraries are left alone.
    """
    with contextlib.suppress(AttributeError, OSError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_ARENA_MAX, 1)
        mallopt(_MMAP_THRESHOLD, _LARGEST_KEPT_BYTES)
        mallopt(_TRIM_THRESHOLD, _IDLE_KEPT_BYTES)

"""The caps an owner sets on what the worker may use of the machine.

They are in the environment, since numerical libraries read their thread counts when they are
imported.
"""

import os
import resource
from typing import NamedTuple

from hypergpu.units import Milliseconds

THREADS = "HYPERGPU_WORKER_THREADS"
MEMORY_BYTES = "HYPERGPU_WORKER_MEMORY_BYTES"
STEP_FLOOR_MS = "HYPERGPU_WORKER_STEP_FLOOR_MS"
SLOWNESS_FILE = "HYPERGPU_WORKER_SLOWNESS_FILE"
_LIBRARY_THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


class LimitError(ValueError):
    """A cap is not a number."""


class Limits(NamedTuple):
    """``threads`` is 1 unless set: CPU results then do not depend on how many cores there are."""

    threads: int
    memory_bytes: int
    """0: no cap. On a CPU it caps the process's data, of which torch itself takes up to 1 GB; on a
    GPU it caps what torch allocates there.
    """
    step_floor_ms: Milliseconds = Milliseconds(0)
    """No inner step takes less, so that this machine may play a slower one."""
    slowness_path: str = ""
    """A file by which others stretch that time while the worker runs; empty: nobody does."""


def limits_from_environment() -> Limits:
    """Read the caps.

    Raises:
        LimitError: Says which one is no number.
    """
    return Limits(
        _number(THREADS, 1, minimum=1),
        _number(MEMORY_BYTES, 0, minimum=0),
        Milliseconds(_number(STEP_FLOOR_MS, 0, minimum=0)),
        os.environ.get(SLOWNESS_FILE, ""),
    )


def cap_threads(limits: Limits) -> None:
    """Cap library threads; call it before numpy or torch is imported."""
    for name in _LIBRARY_THREADS:
        os.environ[name] = str(limits.threads)


def cap_memory(limits: Limits) -> None:
    """Make allocations beyond the cap fail. Address space stays free, as drivers map much of it."""
    if limits.memory_bytes:
        resource.setrlimit(resource.RLIMIT_DATA, (limits.memory_bytes, limits.memory_bytes))


def _number(name: str, default: int, *, minimum: int) -> int:
    text = os.environ.get(name, "")
    if not text:
        return default
    if not text.isdecimal() or int(text) < minimum:
        raise LimitError(f"{name} is {text!r}; it must be a whole number of at least {minimum}")
    return int(text)

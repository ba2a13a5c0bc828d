"""Where tasks are computed: `Engine`, and the one that uses processes of this machine."""

import os
import queue
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

import structlog

from hypergpu.engine.child import ChildLostError, FramedChild
from hypergpu.engine.tasks import EngineTask, compute, encode_task

log = structlog.get_logger()

_TRIES = 2
_WORKER = (sys.executable, "-P", "-m", "hypergpu.engine.worker")


class EngineClosedError(Exception):
    """The engine was closed before it had computed everything."""


class Engine(Protocol):
    """Computes tasks somewhere; a lost worker costs its task alone."""

    @property
    def workers(self) -> int:
        """How many tasks are computed at a time."""
        ...

    def run(self, tasks: Sequence[EngineTask]) -> list[bytes | None]:
        """Results in the order of the tasks; None: the engine lost it, again and again.

        Blocks; any threads may call at the same time.

        Raises:
            EngineClosedError: `close` was called meanwhile.
        """
        ...

    def close(self) -> None:
        """End what it started, and what runs."""
        ...


class LocalEngine:
    """A pool of processes of this machine, started when they are needed first."""

    def __init__(self, workers: int = 0, command: Sequence[str] = _WORKER) -> None:
        """Start nothing yet.

        Args:
            workers: How many; 0: as many as there are cores.
            command: Starts a worker.
        """
        self.workers = workers or os.cpu_count() or 1
        self.children = [FramedChild(command) for _ in range(self.workers)]
        self._is_closed = False
        # Who was asked last has most in its memory.
        self._free: queue.LifoQueue[FramedChild] = queue.LifoQueue()
        for child in self.children:
            self._free.put(child)

    def run(self, tasks: Sequence[EngineTask]) -> list[bytes | None]:
        """See `Engine`."""
        with ThreadPoolExecutor(self.workers, thread_name_prefix="engine") as threads:
            return list(threads.map(self._run_one, tasks))

    def close(self) -> None:
        """See `Engine`."""
        self._is_closed = True
        for child in self.children:
            child.end()

    def _run_one(self, task: EngineTask) -> bytes | None:
        for _ in range(_TRIES):
            child = self._free.get()
            try:
                return child.ask(encode_task(task))
            except ChildLostError as error:
                if self._is_closed:
                    raise EngineClosedError from None
                log.warning("a worker of the engine was lost", reason=str(error))
            finally:
                self._free.put(child)
        return None


def run_all(engine: Engine, tasks: Sequence[EngineTask]) -> list[bytes]:
    """Results in the order of the tasks: this process computes those that the engine loses."""
    pairs = zip(tasks, engine.run(tasks), strict=True)
    return [compute(task) if result is None else result for task, result in pairs]

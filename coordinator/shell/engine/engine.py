"""Where tasks are computed: `Engine`, and the one that uses processes of this machine."""

import os
import queue
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

import structlog

from coordinator.shell.engine.child import ChildLostError, FramedChild
from coordinator.shell.engine.tasks import Task, TaskResult, compute, decode_result, encode

log = structlog.get_logger()

_TRIES = 2
_WORKER = (sys.executable, "-P", "-m", "coordinator.shell.engine.worker")


class Engine(Protocol):
    """Computes tasks somewhere. Every task gets a result: a lost worker costs its task's time."""

    @property
    def workers(self) -> int:
        """How many tasks are computed at a time."""
        ...

    def run(self, tasks: Sequence[Task]) -> list[TaskResult]:
        """Results in the order of the tasks. Blocks; any thread may call."""
        ...

    def close(self) -> None:
        """End what it started. Nothing may run."""
        ...


class LocalEngine:
    """A pool of processes of this machine, started when they are needed first."""

    def __init__(self, workers: int | None = None, command: Sequence[str] = _WORKER) -> None:
        """Start nothing yet.

        Args:
            workers: How many; None: as many as there are cores.
            command: Starts a worker.
        """
        self.workers = workers or os.cpu_count() or 1
        self.children = [FramedChild(command) for _ in range(self.workers)]
        self._free: queue.SimpleQueue[FramedChild] = queue.SimpleQueue()
        for child in self.children:
            self._free.put(child)

    def run(self, tasks: Sequence[Task]) -> list[TaskResult]:
        """See `Engine`."""
        with ThreadPoolExecutor(self.workers, thread_name_prefix="engine") as threads:
            return list(threads.map(self._run_one, tasks))

    def close(self) -> None:
        """See `Engine`."""
        for child in self.children:
            child.end()

    def _run_one(self, task: Task) -> TaskResult:
        for _ in range(_TRIES):
            child = self._free.get()
            try:
                return decode_result(child.ask(encode(task)))
            except ChildLostError as lost:
                log.warning("a worker of the engine was lost", reason=str(lost))
            finally:
                self._free.put(child)
        return compute(task)

"""The engine that is Ray, by a driver in a process of its own; what it loses is computed here."""

import itertools
import math
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from importlib.util import find_spec
from typing import NamedTuple

import msgspec
import structlog

from hypergpu.engine.child import BatchResults, ChildLostError, FramedChild, Opened, TaskBatch
from hypergpu.engine.engine import LocalEngine
from hypergpu.engine.tasks import EngineTask
from hypergpu.errors import HyperGPUError, Reason
from hypergpu.privacy import public_environment, variables_of

log = structlog.get_logger()

_DRIVER = (sys.executable, "-P", "-m", "hypergpu.engine.ray_driver")
_AGAIN_S = 30.0
"""A Ray that does not answer is asked again after so long; meanwhile this machine computes."""


class _RayBatch(NamedTuple):
    """Tasks that Ray was asked together."""

    number: int
    tasks_count: int
    results: Future[list[bytes | None]]

    def lose(self) -> None:
        """Say that it gets no results."""
        self.results.set_result([None] * self.tasks_count)


class RayEngine:
    """Tasks go to Ray in batches; those that it loses, or all while it is away, to this machine."""

    def __init__(
        self, address: str, command: Sequence[str] = _DRIVER, *, again_s: float = _AGAIN_S
    ) -> None:
        """Start nothing yet.

        Args:
            address: ``ray``, or ``ray://HOST:PORT``.
            command: Starts a driver.
            again_s: Seconds after which a Ray that is away is asked again.

        Raises:
            HyperGPUError: MACHINE_UNFIT, Ray is not installed.
        """
        if find_spec("ray") is None:
            detail = "the engine ray needs the package ray, which is not installed"
            fix = "install the extra: pip install 'hypergpu[ray]'; or take --engine local"
            raise HyperGPUError(Reason.MACHINE_UNFIT, detail, fix=fix)
        self._address = address
        self._command = [*command, address]
        self._again_s = again_s
        self.driver: FramedChild | None = None
        """None: Ray was not asked yet, or is away."""
        self._local = LocalEngine()
        self._turn = threading.Lock()
        self._away_until_s = 0.0
        self._numbers = itertools.count()
        self._waiting: dict[int, _RayBatch] = {}
        self.workers = self._local.workers
        self.lost_count = 0
        """Tasks that were computed here, since Ray lost them or was away."""

    def run(self, tasks: Sequence[EngineTask]) -> list[bytes | None]:
        """See `Engine`."""
        with self._turn:
            batch = self._begin(tasks)
        results = batch.results.result()
        lost_indices = [index for index, result in enumerate(results) if result is None]
        self.lost_count += len(lost_indices)
        computed_results = self._local.run([tasks[index] for index in lost_indices])
        for index, result in zip(lost_indices, computed_results, strict=True):
            results[index] = result
        return results

    def close(self) -> None:
        """See `Engine`."""
        with self._turn:
            self._away_until_s = math.inf
            self._lose(self.driver, "it was ended")
        self._local.close()

    def _begin(self, tasks: Sequence[EngineTask]) -> _RayBatch:
        batch = _RayBatch(next(self._numbers), len(tasks), Future())
        is_away = time.monotonic() < self._away_until_s
        driver = None if is_away else self.driver or self._open()
        if driver is None:
            batch.lose()
            return batch
        self._waiting[batch.number] = batch
        try:
            driver.send(msgspec.msgpack.encode(TaskBatch(batch.number, list(tasks))))
        except ChildLostError as error:
            self._lose(driver, str(error))
        return batch

    def _open(self) -> FramedChild | None:
        # A cluster's token, among others, which no other child sees.
        environment = public_environment() | variables_of("RAY_")
        driver = self.driver = FramedChild(self._command, environment)
        try:
            reply = msgspec.msgpack.decode(driver.ask(b""), type=Opened)
        except ChildLostError as error:
            reply = Opened(failure=str(error))
        if reply.failure:
            self._lose(driver, reply.failure)
            return None
        self.workers = reply.workers
        threading.Thread(target=self._receive, args=(driver,), name="ray", daemon=True).start()
        log.info("Ray computes", engine=self._address, workers=self.workers)
        return driver

    def _receive(self, driver: FramedChild) -> None:
        """Give batches their results until the driver ends."""
        try:
            while True:
                answer = msgspec.msgpack.decode(driver.receive(), type=BatchResults)
                with self._turn:
                    batch = self._waiting.pop(answer.number, None)
                if batch is not None:  # else it was given to this machine
                    batch.results.set_result(answer.results)
        except ChildLostError as error:
            with self._turn:
                self._lose(driver, str(error))

    def _lose(self, driver: FramedChild | None, reason: str) -> None:
        """End the driver, if it is still this one, and give its batches to this machine."""
        if driver is None or driver is not self.driver:
            return
        self.driver = None
        self._away_until_s = max(self._away_until_s, time.monotonic() + self._again_s)
        log.warning("Ray is away: this machine computes", engine=self._address, reason=reason)
        driver.end()
        while self._waiting:
            self._waiting.popitem()[1].lose()

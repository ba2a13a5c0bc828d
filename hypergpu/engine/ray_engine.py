"""The engine that is Ray, by a driver in a process of its own; what it loses is computed here."""

import sys
import threading
import time
from collections.abc import Sequence
from importlib.util import find_spec

import msgspec
import structlog

from hypergpu.engine.child import (
    BatchResults,
    ChildLostError,
    FramedChild,
    Opened,
    TaskBatch,
)
from hypergpu.engine.engine import LocalEngine
from hypergpu.engine.tasks import Task, encode_task
from hypergpu.errors import HyperGPUError, Reason

log = structlog.get_logger()

_DRIVER = (sys.executable, "-P", "-m", "hypergpu.engine.ray_driver")
_AGAIN_S = 30.0
"""A Ray that does not answer is asked again after so long; meanwhile this machine computes."""


class RayEngine:
    """Tasks go to Ray in batches; those that it loses, or all while it is away, to this machine."""

    def __init__(self, address: str, command: Sequence[str] = _DRIVER) -> None:
        """Start nothing yet.

        Args:
            address: ``ray``, or ``ray://HOST:PORT``.
            command: Starts a driver.

        Raises:
            HyperGPUError: MACHINE_UNFIT, Ray is not installed.
        """
        if find_spec("ray") is None:
            detail = "the engine ray needs the package ray, which is not installed"
            fix = "install the extra: pip install 'hypergpu[ray]'; or take --engine local"
            raise HyperGPUError(Reason.MACHINE_UNFIT, detail, fix=fix)
        self._address = address
        self.driver = FramedChild([*command, address])
        self._local = LocalEngine()
        self._turn = threading.Lock()
        self._is_open = False
        self._away_until_s = 0.0
        self.workers = self._local.workers
        self.lost_count = 0
        """Tasks that were computed here, since Ray lost them or was away."""

    def run(self, tasks: Sequence[Task]) -> list[bytes | None]:
        """See `Engine`."""
        with self._turn:
            found = self._ask([encode_task(task) for task in tasks])
        lost = [index for index, payload in enumerate(found) if payload is None]
        self.lost_count += len(lost)
        computed = dict(zip(lost, self._local.run([tasks[each] for each in lost]), strict=True))
        return [
            computed[index] if payload is None else payload for index, payload in enumerate(found)
        ]

    def close(self) -> None:
        """See `Engine`."""
        self.driver.end()
        self._local.close()

    def _ask(self, tasks: list[bytes]) -> list[bytes | None]:
        if time.monotonic() < self._away_until_s:
            return [None] * len(tasks)
        try:
            if not self._is_open:
                self._open()
            answer = self.driver.ask(msgspec.msgpack.encode(TaskBatch(tasks)))
        except ChildLostError as lost:
            log.warning(
                "Ray is away: this machine computes", engine=self._address, reason=str(lost)
            )
            self._is_open = False
            self._away_until_s = time.monotonic() + _AGAIN_S
            return [None] * len(tasks)
        return msgspec.msgpack.decode(answer, type=BatchResults).results

    def _open(self) -> None:
        opened = msgspec.msgpack.decode(self.driver.ask(b""), type=Opened)
        if opened.failure:
            self.driver.end()
            raise ChildLostError(opened.failure)
        self.workers, self._is_open = opened.workers, True
        log.info("Ray computes", engine=self._address, workers=self.workers)

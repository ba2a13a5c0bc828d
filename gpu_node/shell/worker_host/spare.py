"""A worker in reserve: it has imported what workers need and seen no job, so that the node's next
job begins at once. It computes nothing and touches no device before it is used.
"""

import asyncio
from collections.abc import Callable

import structlog

from gpu_node.shell.worker import protocol
from gpu_node.shell.worker_host.worker_process import WorkerLaunch, WorkerProcess

log = structlog.get_logger()


class SpareWorker:
    """One spare at most.

    Args:
        refusal: Says why there is to be none now; empty: there may be one. Blocks.
    """

    def __init__(self, refusal: Callable[[], str]) -> None:
        self._refusal = refusal
        self._process: WorkerProcess | None = None
        self._is_ready = False
        self._change = asyncio.Event()

    @property
    def process_id(self) -> int | None:
        """Id of the spare's process; None: there is none."""
        return None if self._process is None else self._process.process_id

    @property
    def home(self) -> str:
        """The spare's folder of temporary files; empty: there is no spare."""
        return "" if self._process is None else self._process.launch.home

    async def review(self, launch: WorkerLaunch) -> None:
        """Start a spare where there may be one, and end it where there may be none."""
        reason = await asyncio.to_thread(self._refusal)
        if reason and self._process is not None:
            log.info("the spare worker ends", reason=reason)
            await self.end()
        elif not reason and self._process is None:
            process = WorkerProcess(
                launch, on_reply=self._take_reply, on_death=lambda _: self._forget(process)
            )
            self._process = process
            await process.ensure_started(is_spare=True)

    async def ready_process_id(self) -> int:
        """Id of the spare's process, once it is ready."""
        while self._process is None or not self._is_ready:
            self._change.clear()
            await self._change.wait()
        return self._process.process_id or 0

    def take(self) -> WorkerProcess | None:
        """Give the spare away, if it is ready; its new holder binds its callbacks."""
        if self._process is None or not self._is_ready:
            return None
        process, self._process, self._is_ready = self._process, None, False
        return process

    async def end(self) -> None:
        """End the spare."""
        process = self._process
        if process is not None:
            self._forget(process)
            await process.stop()

    def kill(self) -> None:
        """End the spare at once."""
        if self._process is not None:
            self._process.kill("its memory is needed")

    def _take_reply(self, reply: protocol.Reply) -> None:
        self._is_ready = isinstance(reply, protocol.SpareReady)
        self._change.set()
        log.info("a spare worker is ready", pid=self.process_id)

    def _forget(self, process: WorkerProcess) -> None:
        if self._process is process:
            self._process, self._is_ready = None, False

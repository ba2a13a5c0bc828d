"""The worker's process as the daemon holds it: started, asked, read and ended."""

import asyncio
import contextlib
import signal
from asyncio.subprocess import PIPE, Process
from collections.abc import Callable, Mapping
from typing import NamedTuple

import msgspec
import structlog

from gpu_node.shell.worker import protocol
from hypergpu.assignment import FailureCause
from hypergpu.frames import FrameError, frame, next_frame

log = structlog.get_logger()

_STOP_GRACE_S = 5.0
_LOG_LINE_BYTES = 1 << 16


class WorkerLaunch(NamedTuple):
    """How a worker is started."""

    command: tuple[str, ...]
    environment: Mapping[str, str]
    home: str = ""
    """Its folder of temporary files, which no other worker writes to meanwhile."""


class WorkerDeath(NamedTuple):
    """Why a worker's process is gone."""

    reason: str
    cause: FailureCause = FailureCause.OTHER


class WorkerProcess:
    """One worker. After a death the next `ensure_started` spawns another.

    Args:
        launch: How it is started.
        on_reply: Called with each message of the worker.
        on_death: Called after each death, and when it cannot be spawned.
    """

    def __init__(
        self,
        launch: WorkerLaunch,
        *,
        on_reply: Callable[[protocol.Reply], None],
        on_death: Callable[[WorkerDeath], None],
    ) -> None:
        self.launch = launch
        """How the next one is started."""
        self._on_reply = on_reply
        self._on_death = on_death
        self._process: Process | None = None
        self._watching: asyncio.Task[None] | None = None
        self._spawning = asyncio.Lock()
        self.coming_death: WorkerDeath | None = None
        """Set where the reason is known before."""

    @property
    def process_id(self) -> int | None:
        """Id of the running process; None when there is none."""
        return None if self._process is None else self._process.pid

    def bind(
        self, on_reply: Callable[[protocol.Reply], None], on_death: Callable[[WorkerDeath], None]
    ) -> None:
        """Have others told from now on."""
        self._on_reply, self._on_death = on_reply, on_death

    async def ensure_started(self, *, is_spare: bool = False) -> None:
        """Spawn the worker unless it is there.

        Args:
            is_spare: Whether it imports what it needs and then waits for `protocol.UseSpare`.
        """
        async with self._spawning:
            if self._process is None:
                await self._spawn({protocol.SPARE: "1"} if is_spare else {})

    def send(self, request: protocol.Request) -> None:
        """Send without waiting for the worker to read: one that hangs may not."""
        process = self._process
        # One that just died is reported as a death.
        if process is not None and process.stdin is not None:
            process.stdin.write(frame(protocol.encode(request)))

    def kill(self, reason: str = "", cause: FailureCause = FailureCause.OTHER) -> None:
        """End the worker at once; without a reason its death is told as the system does."""
        if self._process is not None:
            if reason and self.coming_death is None:
                self.coming_death = WorkerDeath(reason, cause)
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()

    async def stop(self) -> None:
        """End the worker in good order, and kill it should it not leave."""
        watch_task = self._watching
        if self._process is None or watch_task is None:
            return
        self.send(protocol.StopWorker())
        await asyncio.wait([watch_task], timeout=_STOP_GRACE_S)
        self.kill()
        await asyncio.wait([watch_task])

    async def _spawn(self, variables: Mapping[str, str]) -> None:
        try:
            process = await asyncio.create_subprocess_exec(
                *self.launch.command,
                stdin=PIPE,
                stdout=PIPE,
                stderr=PIPE,
                env={**self.launch.environment, **variables},
                limit=_LOG_LINE_BYTES,
            )
        except OSError as error:
            self._on_death(WorkerDeath(f"it cannot be started: {error.strerror}"))
            return
        self._process, self.coming_death = process, None
        self._watching = asyncio.create_task(self._watch(process), name="worker")
        log.info("a worker was started", pid=process.pid, command=self.launch.command[-1])

    async def _watch(self, process: Process) -> None:
        log_task = asyncio.create_task(self._log(process))
        await self._read_replies(process)
        end_task = asyncio.create_task(self._await_end(process))
        # Its own children may hold its pipes open for any time: that is not waited for.
        await asyncio.wait([log_task, end_task], timeout=_STOP_GRACE_S)
        if process.returncode is None:
            self.kill("it closed its pipe and did not leave")
            await asyncio.wait([end_task], timeout=_STOP_GRACE_S)
        log_task.cancel()
        end_task.cancel()
        self._process = None
        self._on_death(self.coming_death or WorkerDeath(_exit_reason(process.returncode)))

    async def _read_replies(self, process: Process) -> None:
        if process.stdout is None:
            raise AssertionError("the worker was spawned with a pipe")
        try:
            while (payload := await next_frame(process.stdout)) is not None:
                self._on_reply(protocol.decode_reply(payload))
        except (FrameError, msgspec.MsgspecError, UnicodeError) as error:
            self.kill(f"it is not understood: {error}")

    async def _await_end(self, process: Process) -> None:
        """Wait for a process. Asyncio takes it for alive until all its output is read."""
        while process.stdout is not None and await process.stdout.read(_LOG_LINE_BYTES):
            pass
        await process.wait()

    async def _log(self, process: Process) -> None:
        if process.stderr is None:
            return
        while line := await _line(process.stderr):
            log.info(line, pid=process.pid)


async def _line(stream: asyncio.StreamReader) -> str:
    """The next line; one that is too long comes in pieces."""
    try:
        raw = await stream.readuntil(b"\n")
    except asyncio.IncompleteReadError as error:
        raw = error.partial
    except asyncio.LimitOverrunError as overrun:
        raw = await stream.read(max(1, overrun.consumed))
    text = raw.decode("utf-8", "replace")
    return text.rstrip() or (" " if raw else "")


def _exit_reason(status: int | None) -> str:
    if status is None:
        return "it cannot be ended"
    # A sandbox says so of what it ran, as shells do.
    number = status - 128 if status > 128 else -status
    if number <= 0:
        return f"it left with status {status}"
    with contextlib.suppress(ValueError):
        return f"it was ended by {signal.Signals(number).name}"
    return f"it was ended by signal {number}"

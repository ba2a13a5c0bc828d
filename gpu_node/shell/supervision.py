"""The worker process: spawned when first needed, listened to, ended when it does not obey."""

import asyncio
import contextlib
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from typing import NamedTuple

import msgspec
import structlog

from gpu_node.shell.worker.limits import MEMORY_BYTES, STEP_FLOOR_MS, THREADS
from gpu_node.shell.worker.messages import (
    Abort,
    Aborted,
    Draw,
    DrawingReply,
    Drawn,
    Failed,
    NotDrawn,
    Ready,
    Reply,
    Request,
    Stop,
    Train,
    Trained,
    TrainingReply,
    decode_reply,
    encode,
)
from hypergpu.errors import HyperGPUError, Reason
from hypergpu.wire.frames import FrameError, frame, next_frame

log = structlog.get_logger()

_ABORT_GRACE_S = 10.0
"""A worker may be deep in one inner step; one that takes longer hangs."""
_STOP_GRACE_S = 5.0
_LOG_LINE_BYTES = 1 << 16


def worker_kind(wanted: str) -> str:
    """The kind to spawn: ``auto`` is torch where it is installed, else numpy."""
    if wanted != "auto":
        return wanted
    return "torch" if find_spec("torch") else "numpy"


def worker_command(kind: str) -> tuple[str, ...]:
    """The command line of a worker, which finds its code where this process found it."""
    safe = ("-P",) if sys.flags.safe_path else ()
    return (sys.executable, *safe, "-m", "gpu_node.shell.worker", "--kind", kind)


def worker_caps(threads: int, memory_bytes: int, step_floor_ms: int = 0) -> dict[str, str]:
    """The owner's caps as the worker reads them; 0 is none."""
    caps = {THREADS: threads, MEMORY_BYTES: memory_bytes, STEP_FLOOR_MS: step_floor_ms}
    return {name: str(cap) for name, cap in caps.items() if cap}


class Ears(NamedTuple):
    """Who hears what the worker says and of its death, with the reason."""

    reply: Callable[[TrainingReply], None]
    death: Callable[[str], None]


_DEAF = Ears(lambda _: None, lambda _: None)


class WorkerProcess:
    """One worker. After a death the next request spawns another."""

    def __init__(self, command: tuple[str, ...], environment: Mapping[str, str]) -> None:
        self._command = command
        self._environment = environment
        self._ears = _DEAF
        self._process: Process | None = None
        self._watching: asyncio.Task[None] | None = None
        self._impatience: dict[int, asyncio.TimerHandle] = {}
        self._drawing: dict[int, asyncio.Future[DrawingReply]] = {}
        self._last_words = ""
        self._spawning = asyncio.Lock()
        self._ready: asyncio.Future[Ready] | None = None
        self.got_ready = False
        """Whether the process started last got as far as `Ready`."""

    @property
    def process_id(self) -> int | None:
        """Of the running process; None when there is none."""
        return None if self._process is None else self._process.pid

    def listen(self, ears: Ears) -> None:
        """Who hears it from now on."""
        self._ears = ears

    async def ready(self) -> Ready:
        """Spawn the worker and learn what it can do.

        Raises:
            HyperGPUError: WORKER_UNUSABLE, it died before it was ready.
        """
        self._ready = asyncio.get_running_loop().create_future()
        await self._spawn()
        return await self._ready

    async def start(self) -> None:
        """Spawn the worker unless it is there; its `Ready` or its death is heard later."""
        await self._spawn()

    def end(self, why: str) -> None:
        """End the worker at once: heard as a death for this reason."""
        self._kill(why)

    async def train(self, request: Train) -> None:
        """Train a shard; the reply or the death is heard later."""
        await self._spawn()
        self._say(request)

    async def draw(self, request: Draw) -> DrawingReply:
        """Make a job's first model, once the worker is done with what it has in hand.

        Raises:
            HyperGPUError: WORKER_UNUSABLE, it died first.
        """
        answer: asyncio.Future[DrawingReply] = asyncio.get_running_loop().create_future()
        self._drawing[request.number] = answer
        try:
            await self._spawn()
            self._say(request)
            return await answer
        finally:
            self._drawing.pop(request.number, None)

    def abort(self, lease: int) -> None:
        """Drop a shard. A worker that does not answer in time is ended: heard as a death."""
        loop = asyncio.get_running_loop()
        self._impatience[lease] = loop.call_later(_ABORT_GRACE_S, self._kill, "it would not abort")
        self._say(Abort(lease))

    async def stop(self) -> None:
        """End the worker without a word to anybody."""
        process, watching = self._process, self._watching
        if process is None or watching is None:
            return
        self._ears = _DEAF
        self._say(Stop())
        await asyncio.wait([watching], timeout=_STOP_GRACE_S)
        self._kill("")
        await asyncio.wait([watching])

    async def _spawn(self) -> None:
        async with self._spawning:
            if self._process is None:
                await self._start_process()

    async def _start_process(self) -> None:
        self.got_ready = False
        try:
            process = await asyncio.create_subprocess_exec(
                *self._command,
                stdin=PIPE,
                stdout=PIPE,
                stderr=PIPE,
                env=dict(self._environment),
                limit=_LOG_LINE_BYTES,
            )
        except OSError as broken:
            self._report_death(f"it cannot be started: {broken.strerror}")
            return
        self._process, self._last_words = process, ""
        self._watching = asyncio.create_task(self._watch(process), name="worker")
        log.info("a worker was started", pid=process.pid, command=self._command[-1])

    def _say(self, request: Request) -> None:
        """Say something without waiting until it is heard: a worker that hangs may not hear it."""
        process = self._process
        # One that just died is heard of as a death.
        if process is not None and process.stdin is not None:
            process.stdin.write(frame(encode(request)))

    async def _watch(self, process: Process) -> None:
        logging = asyncio.create_task(self._log(process))
        await self._listen(process)
        ending = asyncio.create_task(self._await_end(process))
        # What it started may hold its pipes open for as long as it likes: that is not waited for.
        await asyncio.wait([logging, ending], timeout=_STOP_GRACE_S)
        if process.returncode is None:
            self._kill("it closed its pipe and did not leave")
            await asyncio.wait([ending], timeout=_STOP_GRACE_S)
        logging.cancel()
        ending.cancel()
        self._process = None
        self._report_death(self._last_words or _how_it_ended(process.returncode))

    async def _listen(self, process: Process) -> None:
        if process.stdout is None:
            raise AssertionError("the worker was spawned with a pipe")
        try:
            while (payload := await next_frame(process.stdout)) is not None:
                self._hear(decode_reply(payload))
        except (FrameError, msgspec.MsgspecError, UnicodeError) as broken:
            self._kill(f"it is not understood: {broken}")

    async def _await_end(self, process: Process) -> None:
        """Wait for a process. Until all that it wrote is read asyncio takes it for a living one."""
        while process.stdout is not None and await process.stdout.read(_LOG_LINE_BYTES):
            pass
        await process.wait()

    def _hear(self, reply: Reply) -> None:
        if isinstance(reply, Ready):
            self.got_ready = True
            if self._ready is not None and not self._ready.done():
                self._ready.set_result(reply)
        elif isinstance(reply, Trained | Failed | Aborted):
            self._calm(reply.lease)
        if isinstance(reply, Failed | NotDrawn) and reply.is_fatal:
            self._last_words = reply.reason  # it leaves now, and is heard of as a death
        elif isinstance(reply, Drawn | NotDrawn):
            # Whoever asked may have stopped waiting.
            answer = self._drawing.get(reply.number)
            if answer is not None and not answer.done():
                answer.set_result(reply)
        else:
            self._ears.reply(reply)

    def _calm(self, lease: int) -> None:
        timer = self._impatience.pop(lease, None)
        if timer is not None:
            timer.cancel()

    def _kill(self, why: str) -> None:
        if self._process is not None:
            self._last_words = self._last_words or why
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()

    def _report_death(self, reason: str) -> None:
        for lease in tuple(self._impatience):
            self._calm(lease)
        if self._ready is not None and not self._ready.done():
            refusal = HyperGPUError(Reason.WORKER_UNUSABLE, f"the worker never got ready: {reason}")
            self._ready.set_exception(refusal)
        for answer in self._drawing.values():
            if not answer.done():
                died = HyperGPUError(Reason.WORKER_UNUSABLE, f"the worker died: {reason}")
                answer.set_exception(died)
        tell = log.info if self._ears is _DEAF else log.warning
        tell("the worker ended", reason=reason)
        self._ears.death(reason)

    async def _log(self, process: Process) -> None:
        if process.stderr is None:
            return
        while line := await _line(process.stderr):
            log.info(line, pid=process.pid)


async def _line(stream: asyncio.StreamReader) -> str:
    """The next line; one that is too long comes in pieces."""
    try:
        raw = await stream.readuntil(b"\n")
    except asyncio.IncompleteReadError as ended:
        raw = ended.partial
    except asyncio.LimitOverrunError as overrun:
        raw = await stream.read(max(1, overrun.consumed))
    text = raw.decode("utf-8", "replace")
    return text.rstrip() or (" " if raw else "")


def _how_it_ended(status: int | None) -> str:
    if status is None:
        return "it cannot be ended"
    if status >= 0:
        return f"it left with status {status}"
    with contextlib.suppress(ValueError):
        return f"it was ended by {signal.Signals(-status).name}"
    return f"it was ended by signal {-status}"

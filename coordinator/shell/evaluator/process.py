"""The evaluator's process as the coordinator holds it: spawned when first needed, and again when it
has died.
"""

import asyncio
import contextlib
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Mapping
from typing import TypeVar

import msgspec

from coordinator.shell.evaluator.messages import (
    Evaluate,
    Evaluated,
    EvaluatorFailure,
    Initialise,
    Initialised,
    MeasureUpdates,
    Reply,
    Request,
    UpdatesMeasured,
)
from hypergpu.errors import HyperGPUError, Reason
from hypergpu.wire.frames import FrameError, frame, next_frame

_COMMAND = (sys.executable, "-m", "coordinator.shell.evaluator")
_STOP_TIMEOUT_S = 5.0
_KILL_TIMEOUT_S = 30.0
"""A killed process on a busy machine takes this long at most."""
_ANSWER_TIMEOUT_S = 3600.0
"""Far beyond any evaluation: it ends one that hangs, which every other job would wait for."""

_Answer = TypeVar("_Answer", Initialised, Evaluated, UpdatesMeasured)


class EvaluatorProcess:
    """One evaluator, asked one thing at a time in order of asking.

    A request raises `HyperGPUError` with the evaluator's reason where it cannot be met, and with
    NOT_READY when the process died twice or did not answer in time. Cancelling a request kills the
    process, as its answer would otherwise be taken for the next one's.
    """

    def __init__(
        self,
        command: tuple[str, ...] = _COMMAND,
        *,
        environment: Mapping[str, str] | None = None,
        answer_timeout_s: float = _ANSWER_TIMEOUT_S,
    ) -> None:
        self._command = command
        self._answer_timeout_s = answer_timeout_s
        self._environment = environment
        self._process: Process | None = None
        self._turn = asyncio.Lock()

    @property
    def process_id(self) -> int | None:
        """Id of the running process; None when there is none."""
        return None if self._process is None else self._process.pid

    async def initialise(self, request: Initialise) -> Initialised:
        """Make an initial model."""
        return await self._ask(request, Initialised)

    async def evaluate(self, request: Evaluate) -> Evaluated:
        """Measure a model."""
        return await self._ask(request, Evaluated)

    async def measure_updates(self, request: MeasureUpdates) -> UpdatesMeasured:
        """Measure single updates."""
        return await self._ask(request, UpdatesMeasured)

    async def stop(self) -> None:
        """Let the process end after its current request, and kill it when that takes too long."""
        process, self._process = self._process, None
        if process is None or process.returncode is not None:
            return
        if process.stdin is not None:
            process.stdin.close()
        try:
            await asyncio.wait_for(process.wait(), _STOP_TIMEOUT_S)
        except TimeoutError:
            process.kill()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(process.wait(), _KILL_TIMEOUT_S)

    async def _ask(self, request: Request, answer: type[_Answer]) -> _Answer:
        async with self._turn:
            reply = await self._ask_once(request) or await self._ask_once(request)
        if reply is None:
            raise HyperGPUError(
                Reason.NOT_READY, "the evaluator died twice on this request; its log says why"
            )
        if isinstance(reply, EvaluatorFailure):
            raise HyperGPUError(Reason[reply.reason], reply.detail)
        if not isinstance(reply, answer):
            detail = f"the evaluator answered {type(reply).__name__}"
            raise HyperGPUError(Reason.NOT_READY, detail)
        return reply

    async def _ask_once(self, request: Request) -> Reply | None:
        """The reply; None when the process died first."""
        process = await self._spawn()
        payload = None
        try:
            async with asyncio.timeout(self._answer_timeout_s):
                payload = await _exchange(process, frame(msgspec.msgpack.encode(request)))
        except (FrameError, ConnectionError):
            pass
        except TimeoutError:
            limit = f"{self._answer_timeout_s:g} s"
            detail = f"the evaluator did not answer within {limit} and was ended"
            raise HyperGPUError(Reason.NOT_READY, detail) from None
        finally:
            if payload is None:
                await self._kill(process)
        return None if payload is None else msgspec.msgpack.decode(payload, type=Reply)

    async def _spawn(self) -> Process:
        if self._process is None or self._process.returncode is not None:
            self._process = await asyncio.create_subprocess_exec(
                *self._command, stdin=PIPE, stdout=PIPE, env=self._environment
            )
        return self._process

    async def _kill(self, process: Process) -> None:
        self._process = None
        if process.returncode is None:
            process.kill()
        # asyncio takes a process for a living one until all that it wrote is read, and until what
        # it started has closed its pipes too.
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(process.communicate(), _STOP_TIMEOUT_S)


async def _exchange(process: Process, question: bytes) -> bytes | None:
    if process.stdin is None or process.stdout is None:
        return None
    process.stdin.write(question)
    await process.stdin.drain()
    return await next_frame(process.stdout)

"""The coordinator's hold on the evaluator: spawned when first needed, again when it died."""

import asyncio
import contextlib
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Mapping

from coordinator.shell.evaluator.messages import (
    Evaluate,
    Evaluated,
    Failed,
    Initialise,
    Initialised,
    JudgeUpdates,
    Reply,
    Request,
    UpdatesJudged,
    decode_reply,
    encode,
)
from hypergpu.errors import HyperGPUError, Reason
from hypergpu.wire.frames import FrameError, frame, next_frame

_COMMAND = (sys.executable, "-m", "coordinator.shell.evaluator")
_STOP_TIMEOUT_S = 5.0
_KILLED_WITHIN_S = 30.0
"""On a busy machine."""
_ANSWER_TIMEOUT_S = 3600.0
"""Far beyond any evaluation: it ends one that hangs, which every other job would wait for."""


class EvaluatorProcess:
    """One evaluator, asked one thing at a time in order of asking.

    Cancelling a request kills the process, as its answer would otherwise be taken for the next
    one's.
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
        """Of the running process; None when there is none."""
        return None if self._process is None else self._process.pid

    async def initialise(self, request: Initialise) -> Initialised:
        """Make an initial model.

        Raises:
            HyperGPUError: It cannot be made, with the reason; NOT_READY when the process died twice
            or did not answer in time.
        """
        reply = await self._ask(request)
        if not isinstance(reply, Initialised):
            raise _unexpected_reply(reply)
        return reply

    async def evaluate(self, request: Evaluate) -> Evaluated:
        """Measure a model.

        Raises:
            HyperGPUError: It cannot be measured, with the reason; NOT_READY when the process died
            twice or did not answer in time.
        """
        reply = await self._ask(request)
        if not isinstance(reply, Evaluated):
            raise _unexpected_reply(reply)
        return reply

    async def judge(self, request: JudgeUpdates) -> UpdatesJudged:
        """Measure single updates.

        Raises:
            HyperGPUError: They cannot be measured, with the reason; NOT_READY when the process died
            twice or did not answer in time.
        """
        reply = await self._ask(request)
        if not isinstance(reply, UpdatesJudged):
            raise _unexpected_reply(reply)
        return reply

    async def stop(self) -> None:
        """Let the process end after what it is doing, and kill it when that takes too long."""
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
                await asyncio.wait_for(process.wait(), _KILLED_WITHIN_S)

    async def _ask(self, request: Request) -> Reply:
        async with self._turn:
            for _ in range(2):
                reply = await self._ask_once(request)
                if reply is not None:
                    break
            else:
                raise HyperGPUError(
                    Reason.NOT_READY, "the evaluator died twice on this request; its log says why"
                )
        if isinstance(reply, Failed):
            raise HyperGPUError(Reason[reply.reason], reply.detail)
        return reply

    async def _ask_once(self, request: Request) -> Reply | None:
        """The reply; None when the process died first."""
        process = await self._running()
        try:
            async with asyncio.timeout(self._answer_timeout_s):
                payload = await _exchange(process, frame(encode(request)))
        except (FrameError, ConnectionError):
            payload = None
        except TimeoutError:
            await self._kill(process)
            raise HyperGPUError(Reason.NOT_READY, self._silence()) from None
        except asyncio.CancelledError:
            await self._kill(process)
            raise
        if payload is None:
            await self._kill(process)
            return None
        return decode_reply(payload)

    def _silence(self) -> str:
        return f"the evaluator did not answer within {self._answer_timeout_s:g} s and was ended"

    async def _running(self) -> Process:
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


def _unexpected_reply(reply: Reply) -> HyperGPUError:
    return HyperGPUError(Reason.NOT_READY, f"the evaluator answered {type(reply).__name__}")

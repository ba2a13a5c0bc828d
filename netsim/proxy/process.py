"""Proxies in a process of their own: the same links, not delayed by whatever its owner does."""

import asyncio
import sys
from types import TracebackType
from typing import Self

import msgspec

from netsim.link.link import Link
from netsim.proxy.messages import (
    Answer,
    Condition,
    Failed,
    Opened,
    Plan,
    ReadStatistics,
    Request,
    Reset,
    SetCondition,
    SetLink,
    Statistics,
)
from netsim.refusal import RefusedError

_START_S = 60.0
_ANSWER_S = 30.0
_END_S = 10.0
_LINE_BYTES_MAX = 16 << 20


class ProxyProcess:
    """As `Proxies`, but each request is awaited.

    Args:
        plan: The nodes and their links.
        answer_s: How long an answer may take.
    """

    def __init__(self, plan: Plan, *, answer_s: float = _ANSWER_S) -> None:
        self._plan = plan
        self._listens = {node.name: node.listen for node in plan.nodes}
        self._ports: dict[str, tuple[int, ...]] = {}
        self._process: asyncio.subprocess.Process | None = None
        self._asking = asyncio.Lock()
        self._answer_s = answer_s
        self._is_broken = False

    async def __aenter__(self) -> Self:
        self._process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", "-m", "netsim.proxy"),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            # Ctrl-C is for the owner, who ends this process in order.
            start_new_session=True,
            limit=_LINE_BYTES_MAX,
        )
        try:
            opened = await self._ask(self._plan, timeout_s=_START_S)
            assert isinstance(opened, Opened)  # noqa: S101 - the only answer to a plan
            self._ports = dict(opened.ports)
        except BaseException:
            await self._end()
            raise
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._end()

    @property
    def pid(self) -> int | None:
        """The process's number; None while it does not run."""
        return None if self._process is None else self._process.pid

    def ports(self, name: str) -> tuple[int, ...]:
        """Where a node's proxy listens, in the order of its forwards."""
        if name not in self._ports:
            known = ", ".join(self._ports)
            raise RefusedError(f"there is no proxy for {name!r}", f"name one of {known}")
        return self._ports[name]

    def address(self, name: str) -> tuple[str, int]:
        """The address of a node's first forward."""
        return self._listens[name], self.ports(name)[0]

    async def set(self, name: str, link: Link) -> None:
        """Give a node another link, which varies no more."""
        await self._ask(SetLink(name, link))

    async def become(self, name: str, condition: Condition) -> None:
        """Let a node's link do something else to what crosses it."""
        await self._ask(SetCondition(name, condition))

    async def cut(self, name: str) -> None:
        """Lose everything from and to a node, and tell nobody."""
        await self.become(name, Condition.CUT)

    async def stall(self, name: str) -> None:
        """Hold everything from and to a node."""
        await self.become(name, Condition.STALLED)

    async def half_open(self, name: str) -> None:
        """Accept and never answer; connections that there are go silent for good."""
        await self.become(name, Condition.HALF_OPEN)

    async def disconnect(self, name: str) -> None:
        """Reset a node's connections and refuse new ones."""
        await self.become(name, Condition.DISCONNECTED)

    async def heal(self, name: str) -> None:
        """Undo whichever of these it was."""
        await self.become(name, Condition.OPEN)

    async def reset(self, name: str) -> None:
        """Break off a node's connections, both ends told at once; new ones are welcome."""
        await self._ask(Reset(name))

    async def statistics(self) -> Statistics:
        """What was done so far, and how late: ``lateness.is_valid`` decides whether it counts."""
        answer = await self._ask(ReadStatistics())
        assert isinstance(answer, Statistics)  # noqa: S101 - the only answer to this request
        return answer

    async def _ask(self, request: Request | Plan, *, timeout_s: float | None = None) -> Answer:
        # Who is cancelled meanwhile must not leave an answer for the next one who asks.
        return await asyncio.shield(self._exchange(request, timeout_s or self._answer_s))

    async def _exchange(self, request: Request | Plan, timeout_s: float) -> Answer:
        process = self._process
        if process is None or process.stdin is None or process.stdout is None:
            raise RefusedError("the proxies are not open", "use them inside `async with`")
        line = b""
        async with self._asking:
            # A late answer would be taken for that to the next request, so there is no next one.
            if not self._is_broken:
                try:
                    process.stdin.write(msgspec.json.encode(request) + b"\n")
                    line = await asyncio.wait_for(process.stdout.readline(), timeout_s)
                except TimeoutError:
                    self._is_broken = True
                except ConnectionError:
                    line = b""
        if self._is_broken:
            what = "the proxies' process has left a request without an answer for too long"
            raise RefusedError(what, "open the proxies anew, on a machine with less to do")
        if not line:
            raise RefusedError("the proxies' process is gone", "see its words on standard error")
        answer: Answer = msgspec.json.decode(line, type=Answer)
        if isinstance(answer, Failed):
            raise RefusedError(answer.what, answer.fix)
        return answer

    async def _end(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        if process.stdin is not None:
            process.stdin.close()
        try:
            await asyncio.wait_for(process.wait(), _END_S)
        except TimeoutError:
            process.kill()
            await process.wait()

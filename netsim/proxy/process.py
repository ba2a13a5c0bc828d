"""Proxies in a process of their own: the same links, not delayed by whatever its owner does."""

from types import TracebackType
from typing import Self

from netsim.child import ANSWER_S, START_S, AnsweringChild
from netsim.error import NetsimError
from netsim.link.link import Link
from netsim.proxy.messages import (
    Answer,
    Condition,
    Opened,
    Plan,
    ReadStatistics,
    Reset,
    SetCondition,
    SetLink,
    Statistics,
)


class ProxyProcess:
    """As `Proxies`, but each request is awaited.

    Args:
        plan: The nodes and their links.
        answer_s: How long an answer may take.
    """

    def __init__(self, plan: Plan, *, answer_s: float = ANSWER_S) -> None:
        self._plan = plan
        self._listens = {node.name: node.listen for node in plan.nodes}
        self._ports: dict[str, tuple[int, ...]] = {}
        self._child = AnsweringChild(
            "netsim.proxy", "the proxies' process", answers=Answer, answer_s=answer_s
        )

    async def __aenter__(self) -> Self:
        await self._child.start()
        try:
            opened = await self._child.ask(self._plan, timeout_s=START_S)
            assert isinstance(opened, Opened)  # noqa: S101 - the only answer to a plan
            self._ports = dict(opened.ports)
        except BaseException:
            await self._child.end()
            raise
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._child.end()

    @property
    def pid(self) -> int | None:
        """The process's number; None while it does not run."""
        return self._child.process_id

    def ports(self, name: str) -> tuple[int, ...]:
        """Where a node's proxy listens, in the order of its forwards."""
        if name not in self._ports:
            known = ", ".join(self._ports)
            raise NetsimError(f"there is no proxy for {name!r}", f"name one of {known}")
        return self._ports[name]

    def address(self, name: str) -> tuple[str, int]:
        """The address of a node's first forward."""
        return self._listens[name], self.ports(name)[0]

    async def set(self, name: str, link: Link) -> None:
        """Give a node another link, which varies no more."""
        await self._child.ask(SetLink(name, link))

    async def become(self, name: str, condition: Condition) -> None:
        """Let a node's link do something else to what crosses it."""
        await self._child.ask(SetCondition(name, condition))

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
        await self._child.ask(Reset(name))

    async def statistics(self) -> Statistics:
        """What was done so far, and how late: ``lateness.is_valid`` decides whether it counts."""
        answer = await self._child.ask(ReadStatistics())
        assert isinstance(answer, Statistics)  # noqa: S101 - the only answer to this request
        return answer

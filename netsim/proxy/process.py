"""Proxies in a process of their own, so that no other program's event loop delays them."""

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from types import TracebackType
from typing import Self

from hypergpu.wire.ports import free_ports
from netsim.emulation.child import ANSWER_S, START_S, AnsweringChild
from netsim.emulation.requests import ReadStatistics, Request
from netsim.link import COORDINATOR_LINK, Link, Shape, Way
from netsim.link.error import NetsimError
from netsim.measure.lateness import Lateness
from netsim.measure.probe import ProbedLink, ProbePath
from netsim.proxy.messages import (
    LOOPBACK,
    Dialler,
    Forward,
    ProxiedNode,
    ProxiesOpened,
    ProxyAnswer,
    ProxyPlan,
    ProxyProtocol,
    ProxyStatistics,
)


class ProxyProcess:
    """A process with a proxy for each node, for as long as the context is open.

    Args:
        plan: The nodes and their links.
        answer_s: How long an answer may take.
    """

    def __init__(self, plan: ProxyPlan, *, answer_s: float = ANSWER_S) -> None:
        self._plan = plan
        self._hosts = {node.name: node.listen for node in plan.nodes}
        self._ports: Mapping[str, tuple[int, ...]] = {}
        self._child = AnsweringChild(
            "netsim.proxy", "the proxies' process", answers=ProxyAnswer, answer_s=answer_s
        )

    async def __aenter__(self) -> Self:
        await self._child.start()
        try:
            opened = await self._child.ask(self._plan, timeout_s=START_S)
            assert isinstance(opened, ProxiesOpened)  # noqa: S101 - the only answer to a plan
            self._ports = opened.ports
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

    def address(self, name: str) -> tuple[str, int]:
        """Return the address of a node's first forward."""
        if name not in self._ports:
            known = ", ".join(self._ports)
            raise NetsimError(f"there is no proxy for {name!r}", f"name one of {known}")
        return self._hosts[name], self._ports[name][0]

    async def obey(self, request: Request) -> object:
        """Pass a request to the proxies and return their answer."""
        return await self._child.ask(request)

    async def statistics(self) -> ProxyStatistics:
        """Return the counters, and how late it was: ``lateness.is_valid`` decides."""
        answer = await self._child.ask(ReadStatistics())
        assert isinstance(answer, ProxyStatistics)  # noqa: S101 - the only answer to this request
        return answer

    async def lateness(self) -> Lateness:
        """Return how late the proxies were so far."""
        return (await self.statistics()).lateness


@asynccontextmanager
async def probed_proxy(
    shape: Shape, *, coordinator: Link = COORDINATOR_LINK, seed: int = 0
) -> AsyncIterator[ProbedLink]:
    """Open one node's proxy only to measure through it."""
    # TCP and UDP under one number each, so that a path is one address whatever is measured.
    up, down, dialled_up, dialled_down = free_ports(4)
    forwards = tuple(
        Forward(target_port=port, port=dialled, protocol=protocol, dialler=dialler)
        for port, dialled, dialler in (
            (up, dialled_up, Dialler.NODE),
            (down, dialled_down, Dialler.COORDINATOR),
        )
        for protocol in ProxyProtocol
    )
    node = ProxiedNode(name="node-0", shape=shape, forwards=forwards)
    ports: dict[Way, tuple[int, int]] = {"up": (up, dialled_up), "down": (down, dialled_down)}
    paths = {
        way: ProbePath(receiver=(LOOPBACK, port), target=(LOOPBACK, dialled))
        for way, (port, dialled) in ports.items()
    }
    plan = ProxyPlan(nodes=(node,), coordinator=coordinator, seed=seed)
    async with ProxyProcess(plan) as proxies:
        yield ProbedLink(paths, proxies.lateness)

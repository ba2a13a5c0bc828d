"""Proxies in a process of their own: what is said to it, as lines of JSON, and the owner's side.

No other program's event loop delays them.
"""

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from enum import StrEnum
from typing import Self

import msgspec

from hypergpu.units import Bytes
from hypergpu.wire.free_ports import free_ports
from netsim.emulation.requests import (
    ANSWER_S,
    START_S,
    AnsweringChild,
    Condition,
    LinkRequest,
    LinkRequestFailed,
    PacketCount,
    ReadStatistics,
    RequestDone,
)
from netsim.link import COORDINATOR_LINK, Link, NetsimError, Shape, Way
from netsim.measure.lateness import Lateness
from netsim.measure.probe import ProbedLink, ProbePath

LOOPBACK = "127.0.0.1"


class ProxyProtocol(StrEnum):
    """The transport that a port forwards."""

    TCP = "tcp"
    UDP = "udp"


class Dialler(StrEnum):
    """The end that opens connections through a forward."""

    NODE = "node"
    COORDINATOR = "coordinator"
    """A real node's network would have to let these in; for measuring the direction down."""


class Forward(msgspec.Struct, frozen=True, kw_only=True):
    """One port of a node's proxy."""

    target_port: int
    target_host: str = LOOPBACK
    port: int = 0
    """Port to listen on; 0: a free one."""
    protocol: ProxyProtocol = ProxyProtocol.TCP
    dialler: Dialler = Dialler.NODE


class ProxiedNode(msgspec.Struct, frozen=True, kw_only=True):
    """One node: its link and where it dials.

    A program that learns a second port from the first one's answer, as nodes do, needs an address
    of its own in 127.0.0.0/8 to ``listen`` on, and the same ``port`` numbers as its targets'.
    """

    name: str
    shape: Shape
    forwards: tuple[Forward, ...]
    listen: str = LOOPBACK


class ProxyPlan(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that proxies begin with; the first line to a process of them."""

    nodes: tuple[ProxiedNode, ...]
    coordinator: Link = COORDINATOR_LINK
    """The coordinator's own link, which all nodes share."""
    seed: int = 0


class ProxyCount(msgspec.Struct, frozen=True, kw_only=True):
    """Counters of a node's proxy."""

    condition: Condition
    connections: int
    """Open now."""
    accepted: int
    """Since the beginning."""
    up_bytes: Bytes
    """Bytes of streams, delivered to the target."""
    down_bytes: Bytes
    datagrams_up: PacketCount
    datagrams_down: PacketCount


class ProxyStatistics(msgspec.Struct, frozen=True, tag="statistics", kw_only=True):
    """Everything the proxies did and how late they were: ``lateness.is_valid`` decides."""

    lateness: Lateness
    nodes: Mapping[str, ProxyCount]


class ProxiesOpened(msgspec.Struct, frozen=True, tag="opened", kw_only=True):
    """The answer to the plan."""

    ports: Mapping[str, tuple[int, ...]]
    """Ports of each node, in the order of its forwards."""


ProxyAnswer = ProxiesOpened | RequestDone | LinkRequestFailed | ProxyStatistics


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
            answer = await self._child.ask(self._plan, timeout_s=START_S)
            assert isinstance(answer, ProxiesOpened)  # noqa: S101 - the only answer to a plan
            self._ports = answer.ports
        except BaseException:
            await self._child.end()
            raise
        return self

    async def __aexit__(self, *_raised: object) -> None:
        await self._child.end()

    @property
    def pid(self) -> int | None:
        """The process's number; None while it does not run."""
        return self._child.process_id

    def address(self, name: str) -> tuple[str, int]:
        """Return the address of a node's first forward."""
        if name not in self._ports:
            node_list = ", ".join(self._ports)
            raise NetsimError(f"there is no proxy for {name!r}", f"name one of {node_list}")
        return self._hosts[name], self._ports[name][0]

    async def obey(self, request: LinkRequest) -> object:
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
        Forward(target_port=port, port=dialled_port, protocol=protocol, dialler=dialler)
        for port, dialled_port, dialler in (
            (up, dialled_up, Dialler.NODE),
            (down, dialled_down, Dialler.COORDINATOR),
        )
        for protocol in ProxyProtocol
    )
    node = ProxiedNode(name="node-0", shape=shape, forwards=forwards)
    ports: dict[Way, tuple[int, int]] = {"up": (up, dialled_up), "down": (down, dialled_down)}
    paths = {
        way: ProbePath(receiver=(LOOPBACK, port), target=(LOOPBACK, dialled_port))
        for way, (port, dialled_port) in ports.items()
    }
    plan = ProxyPlan(nodes=(node,), coordinator=coordinator, seed=seed)
    async with ProxyProcess(plan) as proxies:
        yield ProbedLink(paths, proxies.lateness)

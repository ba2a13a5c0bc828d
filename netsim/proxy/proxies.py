"""A proxy for each node: a program that dials it meets the node's link on the way to its target.

    node = ProxiedNode(name="node-0", shape=shape, forwards=(Forward(target_port=7700),))
    async with Proxies(ProxyPlan(nodes=(node,))) as proxies:
        host, port = proxies.address("node-0")
        await proxies.obey(SetCondition("node-0", Condition.CUT))

They share the event loop that they are opened in. A program that keeps its loop busy delays its own
network; `ProxyProcess` has a loop of its own.
"""

import asyncio
from types import TracebackType
from typing import Self

from netsim.emulation.requests import (
    ReadStatistics,
    Request,
    RequestDone,
    Reset,
    SetCondition,
    SetShape,
)
from netsim.link.error import NetsimError
from netsim.proxy.clock import LoopClock
from netsim.proxy.messages import ProxyPlan, ProxyStatistics
from netsim.proxy.node import NodeProxy, SharedLinkEnd


class Proxies:
    """Every node's proxy, for as long as the context is open.

    Args:
        plan: The nodes and their links.
    """

    def __init__(self, plan: ProxyPlan) -> None:
        self._plan = plan
        self._shared: SharedLinkEnd | None = None
        self._nodes: dict[str, NodeProxy] = {}
        names = [node.name for node in plan.nodes]
        for name in names:
            if names.count(name) > 1:
                raise NetsimError(f"two nodes are named {name!r}", "name each node differently")

    async def __aenter__(self) -> Self:
        clock = LoopClock(asyncio.get_running_loop())
        self._shared = SharedLinkEnd(self._plan.coordinator, self._plan.seed, clock)
        try:
            for node in self._plan.nodes:
                self._nodes[node.name] = NodeProxy(node, self._shared)
                await self._nodes[node.name].open()
        except BaseException:
            await self._close()
            raise
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._close()

    def ports(self, name: str) -> tuple[int, ...]:
        """Return the ports on which a node's proxy listens, in the order of its forwards."""
        return self._node(name).ports

    def address(self, name: str) -> tuple[str, int]:
        """Return the address of a node's first forward."""
        node = self._node(name)
        return node.host, node.ports[0]

    async def obey(self, request: Request) -> RequestDone | ProxyStatistics:
        """Carry out a request. What is on the wire arrives as before.

        Raises:
            NetsimError: There is no such node, or its port was taken while it was disconnected.
        """
        match request:
            case ReadStatistics():
                return self.statistics()
            case SetShape(name, shape):
                self._node(name).set_shape(shape)
            case SetCondition(name, condition):
                await self._node(name).set_condition(condition)
            case Reset(name):
                self._node(name).reset()
        return RequestDone()

    def statistics(self) -> ProxyStatistics:
        """Return the counters, and how late they were: ``lateness.is_valid`` decides."""
        return ProxyStatistics(
            lateness=self._require_open().lateness.reading(),
            nodes={name: node.count() for name, node in self._nodes.items()},
        )

    def _require_open(self) -> SharedLinkEnd:
        if self._shared is None:
            fix = "use them inside `async with Proxies(...)`"
            raise NetsimError("the proxies are not open", fix)
        return self._shared

    def _node(self, name: str) -> NodeProxy:
        shared = self._require_open()
        if name not in self._nodes:
            known = ", ".join(self._nodes)
            raise NetsimError(f"there is no proxy for {name!r}", f"name one of {known}")
        shared.clock.catch_up()
        return self._nodes[name]

    async def _close(self) -> None:
        for node in self._nodes.values():
            node.close()
        if self._shared is not None:
            self._shared.clock.close()
        self._shared = None
        self._nodes = {}
        # Transports close their sockets in the loop's next turn.
        await asyncio.sleep(0)

"""A proxy for each node: what dials it meets the node's link on the way to the real target.

    plan = Plan(nodes=(Proxied(name="node-0", link=link, forwards=(Forward(target_port=7700),)),))
    async with Proxies(plan) as proxies:
        host, port = proxies.address("node-0")
        ...
        proxies.cut("node-0")

They share the event loop that they are opened in. A program that keeps its loop busy delays its own
network; `ProxyProcess` has a loop of its own.
"""

import asyncio
from types import TracebackType
from typing import Self

from netsim.error import NetsimError
from netsim.link.link import Link
from netsim.proxy.clock import LoopClock
from netsim.proxy.messages import Condition, Plan, Statistics
from netsim.proxy.node import Middle, ProxiedNode


class Proxies:
    """Every node's proxy, for as long as the context is open.

    Args:
        plan: The nodes and their links.
    """

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._clock: LoopClock | None = None
        self._middle: Middle | None = None
        self._nodes: dict[str, ProxiedNode] = {}
        names = [node.name for node in plan.nodes]
        for name in names:
            if names.count(name) > 1:
                raise NetsimError(f"two nodes are named {name!r}", "name each node differently")

    async def __aenter__(self) -> Self:
        self._clock = LoopClock(asyncio.get_running_loop())
        self._middle = Middle(self._plan.coordinator, self._plan.seed, self._clock)
        try:
            for plan in self._plan.nodes:
                self._nodes[plan.name] = ProxiedNode(plan, self._middle)
                self._nodes[plan.name].open()
        except BaseException:
            self._close()
            raise
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._close()

    def ports(self, name: str) -> tuple[int, ...]:
        """Where a node's proxy listens, in the order of its forwards."""
        return self._node(name).ports

    def address(self, name: str) -> tuple[str, int]:
        """The address of a node's first forward."""
        node = self._node(name)
        return node.host, node.ports[0]

    def set(self, name: str, link: Link) -> None:
        """Give a node another link, which varies no more. What is on the wire arrives as before."""
        self._node(name).set(link)

    def become(self, name: str, condition: Condition) -> None:
        """Let a node's link do something else to what crosses it.

        Raises:
            NetsimError: A port was taken by somebody else while the node was disconnected.
        """
        self._node(name).become(condition)

    def cut(self, name: str) -> None:
        """Lose everything from and to a node, and tell nobody."""
        self.become(name, Condition.CUT)

    def stall(self, name: str) -> None:
        """Hold everything from and to a node."""
        self.become(name, Condition.STALLED)

    def half_open(self, name: str) -> None:
        """Accept and never answer; connections that there are go silent for good."""
        self.become(name, Condition.HALF_OPEN)

    def disconnect(self, name: str) -> None:
        """Reset a node's connections and refuse new ones."""
        self.become(name, Condition.DISCONNECTED)

    def heal(self, name: str) -> None:
        """Undo whichever of these it was."""
        self.become(name, Condition.OPEN)

    def reset(self, name: str) -> None:
        """Break off a node's connections, both ends told at once; new ones are welcome."""
        self._node(name).reset()

    def statistics(self) -> Statistics:
        """What was done so far, and how late: ``lateness.is_valid`` decides whether it counts."""
        if self._middle is None:
            raise _not_open()
        return Statistics(
            lateness=self._middle.lateness.reading(),
            nodes={name: node.count() for name, node in self._nodes.items()},
        )

    def _node(self, name: str) -> ProxiedNode:
        if self._clock is None:
            raise _not_open()
        if name not in self._nodes:
            known = ", ".join(self._nodes)
            raise NetsimError(f"there is no proxy for {name!r}", f"name one of {known}")
        self._clock.catch_up()
        return self._nodes[name]

    def _close(self) -> None:
        for node in self._nodes.values():
            node.close()
        if self._clock is not None:
            self._clock.close()
        self._clock = None
        self._nodes = {}


def _not_open() -> NetsimError:
    return NetsimError("the proxies are not open", "use them inside `async with Proxies(...)`")

"""A proxy for each node: a program that dials it meets the node's link on the way to its target.

    node = ProxiedNode(name="node-0", shape=shape, forwards=(Forward(target_port=7700),))
    async with Proxies(ProxyPlan(nodes=(node,))) as proxies:
        host, port = proxies.address("node-0")
        await proxies.obey(SetCondition("node-0", Condition.CUT))

They share the event loop that they are opened in. A program that keeps its loop busy delays its own
network; `ProxyProcess` has a loop of its own.
"""

import asyncio
import socket
from collections.abc import Callable, Iterator
from typing import Self

from msgspec.structs import replace

from coordinator.core.network.tcp import NetworkPath
from hypergpu.units import Bytes
from netsim.emulation.requests import (
    Condition,
    LinkRequest,
    PacketCount,
    ReadStatistics,
    RequestDone,
    Reset,
    SetCondition,
    SetShape,
    require_no_nat,
)
from netsim.link import (
    NEVER_US,
    STALLED_BITS_PER_S,
    Link,
    LinkCourse,
    LinkDirection,
    NetsimError,
    Shape,
    WanderingDelay,
    Way,
)
from netsim.measure.lateness import LatenessCounter, allowed_us
from netsim.proxy.connection import (
    BUFFER_BYTES,
    NodePaths,
    ProxyConnection,
    SocketAddress,
    SocketEnd,
)
from netsim.proxy.datagrams import DatagramDice, DatagramPath, DatagramPort
from netsim.proxy.hops import Hop, HopPath, LoopClock
from netsim.proxy.process import (
    LOOPBACK,
    Dialler,
    ProxiedNode,
    ProxyCount,
    ProxyPlan,
    ProxyProtocol,
    ProxyStatistics,
)

_BACKLOG = 128
_FAST = 1 << 62


class SharedLinkEnd:
    """What all nodes share: time, seed, the coordinator's own link and the count of lateness."""

    def __init__(self, link: Link, seed: int, clock: LoopClock) -> None:
        self.clock = clock
        self.seed = seed
        self.lateness = LatenessCounter()
        self.up, self.down = (
            Hop(way, WanderingDelay(way, key=f"{seed}/jitter/coordinator/{name}").at, clock)
            for name, way in _by_way(link)
        )


class NodeProxy:
    """Listens for one node and forwards what it says over its link."""

    def __init__(self, plan: ProxiedNode, shared: SharedLinkEnd) -> None:
        self._plan = plan
        self._shared = shared
        self._clock = shared.clock
        self._loop = asyncio.get_running_loop()
        self._key = f"{shared.seed}/{plan.name}"
        self._course = self._course_of(plan.shape)
        self._course_from_us = 0
        self._link = self._course.at(0)
        self._hops = tuple(
            Hop(
                direction,
                self._delay(name, direction),
                self._clock,
                room_bytes=plan.shape.room_bytes(name) if direction.bits_per_s else 0,
            )
            for name, direction in _by_way(self._link)
        )
        # The node's own bottleneck first on its way up, last on its way down.
        self._up = HopPath((self._hops[0], shared.down))
        self._down = HopPath((shared.up, self._hops[1]))
        self._datagrams = (
            self._datagram_path("up", self._up),
            self._datagram_path("down", self._down),
        )
        self._paths = {
            Dialler.NODE: self._node_paths(self._up, self._down),
            Dialler.COORDINATOR: self._node_paths(self._down, self._up),
        }
        self._condition = Condition.OPEN
        self._connections: dict[ProxyConnection, None] = {}
        self._accepted = 0
        self._servers: list[asyncio.Server] = []
        self._datagram_ports: list[DatagramPort] = []
        self.host = plan.listen
        self.ports: tuple[int, ...] = tuple(forward.port for forward in plan.forwards)

    async def open(self) -> None:
        """Listen, and follow the link's course from now on.

        Raises:
            NetsimError: A port or the address cannot be had.
        """
        await self._listen()
        self._follow()

    def close(self) -> None:
        """Give every socket back."""
        self._stop_listening()
        self.reset()

    def set_shape(self, shape: Shape) -> None:
        """Replace the link. What varies it counts from now."""
        self._course = self._course_of(shape)
        self._course_from_us = self._clock.now_us
        link = self._course.at(0)
        for each, (name, direction) in zip(self._hops, _by_way(link), strict=True):
            each.replace(direction, self._delay(name, direction))
        self._change(link)
        self._follow()

    def reset(self) -> None:
        """Break off every connection."""
        for connection in list(self._connections):
            connection.abort()

    async def set_condition(self, condition: Condition) -> None:
        """Change what the link does to everything that crosses it.

        Raises:
            NetsimError: A port was taken by somebody else in the meantime.
        """
        if condition is self._condition:
            return
        await self._leave(self._condition)
        match condition:
            case Condition.STALLED:
                for each in self._hops:
                    each.stop()
            case Condition.CUT:
                self._up.is_cut = self._down.is_cut = True
            case Condition.HALF_OPEN:
                self._silence_all()
            case Condition.DISCONNECTED:
                self._stop_listening()
                self.reset()
            case Condition.OPEN:
                pass
        self._condition = condition

    def count(self) -> ProxyCount:
        """Return the counters so far."""
        return ProxyCount(
            condition=self._condition,
            connections=len(self._connections),
            accepted=self._accepted,
            up_bytes=Bytes(self._up.delivered_bytes),
            down_bytes=Bytes(self._down.delivered_bytes),
            datagrams_up=replace(self._datagrams[0].counts),
            datagrams_down=replace(self._datagrams[1].counts),
        )

    def _silence_all(self) -> None:
        self._up.is_cut = self._down.is_cut = True
        # One whose program has gone closes for good, and leaves the list.
        for connection in list(self._connections):
            connection.silence()

    async def _leave(self, condition: Condition) -> None:
        match condition:
            case Condition.STALLED:
                for each in self._hops:
                    each.resume()
            case Condition.CUT | Condition.HALF_OPEN:
                self._up.is_cut = self._down.is_cut = False
                for connection in self._connections:
                    connection.resume_after_cut()
            case Condition.DISCONNECTED:
                await self._listen()
            case Condition.OPEN:
                pass

    def _course_of(self, shape: Shape) -> LinkCourse:
        require_no_nat(self._plan.name, shape, "the proxy")
        # The key of a world's links, so that every backend has the same ones.
        return LinkCourse(shape, key=f"{self._shared.seed}/link/{self._plan.name}")

    def _follow(self) -> None:
        course = self._course
        now_us = self._clock.now_us - self._course_from_us
        link = course.at(now_us)
        if link != self._link:
            self._change(link)
        next_us = course.next_change_us(now_us)
        if next_us < NEVER_US:
            due_us = self._course_from_us + next_us
            self._clock.at(due_us, lambda: self._follow() if self._course is course else None)

    def _change(self, link: Link) -> None:
        self._link = link
        for each, (name, direction) in zip(self._hops, _by_way(link), strict=True):
            each.change(direction, self._delay(name, direction))
        for path, direction in zip(self._datagrams, (link.up, link.down), strict=True):
            path.dice.change(direction)
        for way in (self._up, self._down):
            way.update_totals()
        # In a gap nobody measures a rate, so the windows stay what they are.
        if min(link.up.bits_per_s or _FAST, link.down.bits_per_s or _FAST) > STALLED_BITS_PER_S:
            for connection in self._connections:
                connection.update_windows()

    def _delay(self, name: Way, direction: LinkDirection) -> Callable[[int], int]:
        return WanderingDelay(direction, key=f"{self._key}/jitter/{name}").at

    def _datagram_path(self, name: str, way: HopPath) -> DatagramPath:
        direction = self._link.up if name == "up" else self._link.down
        dice = DatagramDice(direction, f"{self._key}/{name}")
        return DatagramPath(way, dice, PacketCount(), self._clock, self._note_lateness)

    def _note_lateness(self, late_us: int) -> None:
        delay_us = min(self._up.delay_us, self._down.delay_us)
        self._shared.lateness.add(max(0, late_us), allowed_us(delay_us))

    def _node_paths(self, there: HopPath, back: HopPath) -> NodePaths:
        def models() -> tuple[NetworkPath, NetworkPath]:
            control = self._link.congestion_control
            return there.model(back, control), back.model(there, control)

        # An address of its own is also the one under which the coordinator knows the node.
        source = "" if self._plan.listen == LOOPBACK else self._plan.listen
        return NodePaths(
            there=there,
            back=back,
            models=models,
            clock=self._clock,
            note_lateness=self._note_lateness,
            source=source,
            key=self._key,
        )

    # The ports.

    async def _listen(self) -> None:
        ports = []
        for forward, port in zip(self._plan.forwards, self.ports, strict=True):
            target = (forward.target_host, forward.target_port)
            is_stream = forward.protocol is ProxyProtocol.TCP
            try:
                bound = _bound(self._plan.listen, port, is_stream=is_stream)
            except OSError as error:
                self._stop_listening()
                raise NetsimError(
                    f"{self._plan.name}'s proxy cannot listen on {self._plan.listen}:{port}:"
                    f" {error.strerror or error}",
                    "give a free port (0 takes one) and an address of this machine's loopback",
                ) from error
            ports.append(int(bound.getsockname()[1]))
            if is_stream:
                await self._accept_from(bound, target, forward.dialler)
            else:
                self._forward_datagrams(bound, target, forward.dialler)
        self.ports = tuple(ports)

    def _forward_datagrams(
        self, bound: socket.socket, target: SocketAddress, dialler: Dialler
    ) -> None:
        there, back = self._datagrams if dialler is Dialler.NODE else reversed(self._datagrams)
        self._datagram_ports.append(DatagramPort(bound, target, there=there, back=back))

    async def _accept_from(
        self, bound: socket.socket, target: SocketAddress, dialler: Dialler
    ) -> None:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFER_BYTES)

        def accept() -> SocketEnd:
            self._clock.catch_up()
            connection = ProxyConnection(
                target, self._paths[dialler], number=self._accepted, on_closed=self._forget
            )
            self._accepted += 1
            self._connections[connection] = None
            if self._condition is Condition.HALF_OPEN:
                connection.silence()
            return connection.near

        self._servers.append(await self._loop.create_server(accept, sock=bound, backlog=_BACKLOG))

    def _forget(self, connection: ProxyConnection) -> None:
        self._connections.pop(connection, None)

    def _stop_listening(self) -> None:
        for server in self._servers:
            server.close()
        for port in self._datagram_ports:
            port.close()
        self._servers.clear()
        self._datagram_ports.clear()


def _by_way(link: Link) -> Iterator[tuple[Way, LinkDirection]]:
    yield "up", link.up
    yield "down", link.down


def _bound(host: str, port: int, *, is_stream: bool) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio sends small writes at once for sockets alone that name their protocol.
    kind, protocol = (
        (socket.SOCK_STREAM, socket.IPPROTO_TCP)
        if is_stream
        else (socket.SOCK_DGRAM, socket.IPPROTO_UDP)
    )
    bound = socket.socket(family, kind, protocol)
    try:
        if is_stream:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind((host, port))
    except OSError:
        bound.close()
        raise
    return bound


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

    async def __aexit__(self, *_raised: object) -> None:
        await self._close()

    def ports(self, name: str) -> tuple[int, ...]:
        """Return the ports on which a node's proxy listens, in the order of its forwards."""
        return self._node(name).ports

    def address(self, name: str) -> tuple[str, int]:
        """Return the address of a node's first forward."""
        node = self._node(name)
        return node.host, node.ports[0]

    async def obey(self, request: LinkRequest) -> RequestDone | ProxyStatistics:
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
        open_network = self._require_open()
        if name not in self._nodes:
            node_list = ", ".join(self._nodes)
            raise NetsimError(f"there is no proxy for {name!r}", f"name one of {node_list}")
        open_network.clock.catch_up()
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

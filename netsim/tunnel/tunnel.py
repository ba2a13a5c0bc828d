"""Real packets between hosts of one machine, each in its own network namespace, a router between.

    links = {"node-0": Link(up=..., down=...)}
    async with Tunnel(links, seed=7) as tunnel:
        command = tunnel.host("node-0").command(["ping", "-c3", tunnel.host("coordinator").address])
        ping = await asyncio.create_subprocess_exec(*command)

It needs root, /dev/net/tun and the program ``ip``, and no queueing discipline of the kernel. The
packets themselves go through ``router``, a process of its own.
"""

import fcntl
import os
import struct
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Self

import msgspec

from netsim.emulation.namespaces import (
    COORDINATOR,
    NamespaceNetwork,
    inside_namespace,
    require_namespaces,
    run_batch,
    write_settings,
)
from netsim.emulation.requests import (
    ANSWER_S,
    START_S,
    AnsweringChild,
    LinkRequest,
    LinkRequestFailed,
    PacketCount,
    ReadStatistics,
    RequestDone,
    SetShape,
)
from netsim.link import COORDINATOR_LINK, CongestionControl, Link, NetsimError, PairDelay, Shape
from netsim.measure.lateness import Lateness
from netsim.tunnel.nat_box import NatCount


class TunnelPort(msgspec.Struct, frozen=True, kw_only=True):
    """One host of the plan, and its path to the middle of the internet."""

    name: str
    namespace: str
    address: str
    """Where other hosts find it."""
    shape: Shape
    inside: str = ""
    """The host's own address where a NAT gives it ``address``; empty: ``address``."""
    peers: tuple[tuple[str, CongestionControl], ...] = ()
    """Addresses that are reached with another congestion control than the link's own."""


class TunnelPlan(msgspec.Struct, frozen=True, kw_only=True):
    """The first line to the router; it is answered when every device is up."""

    seed: int
    ports: tuple[TunnelPort, ...]
    pairs: tuple[PairDelay, ...] = ()
    """Delays between ports, which are named."""


class PortCount(msgspec.Struct, frozen=True, kw_only=True):
    """Both directions of one port."""

    up: PacketCount
    down: PacketCount
    nat: NatCount | None = None
    """None: no NAT stands between the host and its link."""
    is_cut: bool = False


class RouterStatistics(msgspec.Struct, frozen=True, tag="statistics", kw_only=True):
    """Everything that the router did so far, and how late it was with it."""

    lateness: Lateness
    ports: Mapping[str, PortCount]
    is_realtime: bool
    """Whether the system runs the router before other programs; else it is late more often."""
    cpu_us: int
    """Processor time of the router."""
    unroutable: int = 0


RouterAnswer = RequestDone | LinkRequestFailed | RouterStatistics


_TUN = Path("/dev/net/tun")
CONTROLS = Path("/proc/sys/net/ipv4/tcp_available_congestion_control")
_DEVICE = "tun0"
_NETWORK = "10.77.0.0/16"
# Nobody routes packets there: hosts behind a NAT are found under their public addresses alone.
_INSIDE_NETWORK = "10.78"
_MTU_BYTES = 1500
# The kernel drops what it cannot queue for a reader; so much is 130 ms of 1 Gbit/s.
_WAITING_PACKETS = 10_000
_TUNSETIFF = 0x400454CA
_IFF_TUN = 0x0001
_IFF_NO_PI = 0x1000


def require_tunnel() -> None:
    """Reject a machine on which the tunnel cannot be built, with what would help."""
    require_namespaces("the tunnel")
    try:
        os.close(os.open(_TUN, os.O_RDWR | os.O_CLOEXEC))
    except OSError as error:
        fix = f"give the container the device (--device {_TUN} --cap-add NET_ADMIN), or use the"
        fix = f"{fix} proxy, which needs nothing"
        raise NetsimError(f"{_TUN} cannot be opened: {error.strerror}", fix) from error


def require_controls(controls: Iterable[CongestionControl]) -> None:
    """Reject a congestion control that this kernel lacks."""
    present = CONTROLS.read_text("ascii").split()
    for control in sorted(set(controls)):
        if control not in present:
            raise NetsimError(
                f"this kernel has no congestion control {control} (it has {', '.join(present)})",
                f"load it (modprobe tcp_{control}) or choose one of these",
            )


def packed_address(text: str) -> bytes:
    """Return an address as it stands in a packet."""
    return bytes(int(part) for part in text.split("."))


def _inside_address(public: str) -> str:
    """Return the own address of the host that a NAT shows under a public one."""
    return ".".join([_INSIDE_NETWORK, *public.split(".")[2:]])


def open_device(port: TunnelPort) -> int:
    """Make the device in the host's namespace and set the host up.

    Returns:
        The descriptor whose reads are packets from the host and whose writes are packets to it. The
        device lives as long as it is open.
    """
    with inside_namespace(port.namespace):
        descriptor = os.open(_TUN, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        request = struct.pack("16sH22x", _DEVICE.encode(), _IFF_TUN | _IFF_NO_PI)
        fcntl.ioctl(descriptor, _TUNSETIFF, request)
        write_settings()
        run_batch(["ip"], _lines(port))
    return descriptor


def _lines(port: TunnelPort) -> list[str]:
    # In a namespace `sysctl net.ipv4.tcp_congestion_control` takes only what the machine's
    # administrator allowed to everybody; a route may always name one.
    own = f"{port.inside}/32" if port.inside else f"{port.address}/16"
    route = f"dev {_DEVICE} proto kernel scope link src {port.inside or port.address}"
    return [
        "link set lo up",
        f"link set {_DEVICE} mtu {_MTU_BYTES} txqueuelen {_WAITING_PACKETS} up",
        f"address add {own} dev {_DEVICE}",
        f"route replace {_NETWORK} {route} congctl {port.shape.link.congestion_control}",
        *(f"route add {peer} {route} congctl {control}" for peer, control in port.peers),
    ]


class Tunnel(NamespaceNetwork):
    """Hosts and emulated links between them, for as long as the context is open.

    Args:
        links: Each node's path to the middle, fixed or varying.
        coordinator: The coordinator's own path to the middle.
        seed: The same seed decides the same about the n-th packet of a direction.
        pairs: Nodes between which packets take another delay than those of both links.
        answer_s: How long the router's answer to a request may take.
    """

    def __init__(
        self,
        links: Mapping[str, Link | Shape],
        coordinator: Link | Shape = COORDINATOR_LINK,
        *,
        seed: int = 0,
        pairs: Iterable[PairDelay] = (),
        answer_s: float = ANSWER_S,
    ) -> None:
        super().__init__("tunnel", links)
        self._shapes = {
            name: link if isinstance(link, Shape) else Shape(link=link)
            for name, link in {COORDINATOR: coordinator, **links}.items()
        }
        self._seed = seed
        self._pairs = tuple(pairs)
        self._router = AnsweringChild(
            "netsim.tunnel.router", "the tunnel's router", answers=RouterAnswer, answer_s=answer_s
        )

    @property
    def router_pid(self) -> int:
        """Process id of the router."""
        pid = self._router.process_id
        if pid is None:
            raise NetsimError("the tunnel is not open", "use it inside `async with Tunnel(...)`")
        return pid

    async def obey(self, request: LinkRequest) -> object:
        """Pass a request to the router. The hosts keep their congestion control."""
        return await self._router.ask(request)

    async def set_link(self, name: str, link: Link | Shape) -> int:
        """Change a link while packets are under way.

        Returns:
            When it changed, in nanoseconds of the monotonic clock; traces count from there.
        """
        shape = link if isinstance(link, Shape) else Shape(link=link)
        answer = await self._router.ask(SetShape(name, shape))
        assert isinstance(answer, RequestDone)  # noqa: S101 - the only answer to this request
        return answer.at_ns

    async def statistics(self) -> RouterStatistics:
        """Return the router's counters, and how late it was: ``lateness.is_valid`` decides."""
        answer = await self._router.ask(ReadStatistics())
        assert isinstance(answer, RouterStatistics)  # noqa: S101 - the only answer to this request
        return answer

    async def lateness(self) -> Lateness:
        """Return how late the router was so far."""
        return (await self.statistics()).lateness

    def _make(self) -> None:
        self._claim_namespaces((), (name for name in self._shapes if name != COORDINATOR))

    async def __aenter__(self) -> Self:
        require_tunnel()
        require_controls(shape.link.congestion_control for shape in self._shapes.values())
        await super().__aenter__()
        try:
            assert self._claim is not None  # noqa: S101 - made one step before
            descriptor = self._claim.descriptor
            await self._router.start(str(descriptor), descriptors=[descriptor])
            await self._router.ask(self._plan(), timeout_s=START_S)
        except BaseException:
            await self._remove()
            raise
        return self

    async def _remove(self) -> None:
        # The router removes everything when its input ends; what it could not is removed after it.
        await self._router.end()
        await super()._remove()

    def _plan(self) -> TunnelPlan:
        controls = {
            self.hosts[name].address: shape.link.congestion_control
            for name, shape in self._shapes.items()
        }
        ports = []
        for name, shape in self._shapes.items():
            own = shape.link.congestion_control
            # Both ends of a link run its congestion control: the coordinator has a route for each.
            others = {a: c for a, c in controls.items() if name == COORDINATOR and c != own}
            port = TunnelPort(
                name=name,
                namespace=self.hosts[name].namespace,
                address=self.hosts[name].address,
                shape=shape,
                inside=_inside_address(self.hosts[name].address) if shape.nat else "",
                peers=tuple(others.items()),
            )
            ports.append(port)
        return TunnelPlan(seed=self._seed, ports=tuple(ports), pairs=self._pairs)

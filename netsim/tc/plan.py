"""A world as namespaces, veth pairs, a bridge and queues: a plan that is data.

Theory of operation. Each host has a namespace with one device, ``eth0``; its other end stands in a
router namespace under a bridge. What goes to a host is queued at that other end. What comes from it
is led through a device of its own (ifb) before it meets the bridge and is queued there, not at
``eth0``: a queue inside the host's namespace would be charged to the sender's socket, and TCP would
hold back (TCP small queues) where a modem's queue would fill.
"""

from collections.abc import Iterator, Mapping

import msgspec

from netsim.link.link import CongestionControl, Link
from netsim.namespaces.host import COORDINATOR
from netsim.tc.queues import Queues, caveats, queues, reasons_for_netem

BRIDGE = "br0"
INSIDE = "eth0"
NETWORK = "10.77.0.0/16"
PREFIX_BITS = 16
MOST_HOSTS = 65_000


class Route(msgspec.Struct, frozen=True, kw_only=True):
    """Where a host's packets go, and the congestion control of connections that go there."""

    destination: str
    congestion_control: CongestionControl


class Neighbour(msgspec.Struct, frozen=True, kw_only=True):
    """A host whose hardware address is known without asking: questions could be lost."""

    address: str
    hardware: str


class Port(msgspec.Struct, frozen=True, kw_only=True):
    """One host and its place at the bridge."""

    name: str
    namespace: str
    address: str
    hardware: str
    outside: str
    """The other end of its ``eth0``, in the router's namespace."""
    ingress: str
    """The device that its own packets are led through."""
    down: Queues
    up: Queues
    routes: tuple[Route, ...]
    neighbours: tuple[Neighbour, ...]


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that is made, in order."""

    router: str
    ports: tuple[Port, ...]

    @property
    def namespaces(self) -> tuple[str, ...]:
        """All that must be made, and removed."""
        return (self.router, *(port.namespace for port in self.ports))


class Need(msgspec.Struct, frozen=True, kw_only=True):
    """A part of the kernel that somebody's link cannot be made without."""

    part: str
    why: str


def plan(links: Mapping[str, Link], coordinator: Link, *, prefix: str) -> Plan:
    """Plan a world.

    Args:
        links: Each node's way to the coordinator, by name.
        coordinator: The coordinator's own way to the middle.
        prefix: Of every namespace's name.
    """
    hosts = {COORDINATOR: coordinator, **links}
    middle = Neighbour(address=address(1), hardware=hardware(1))
    nodes = [(number, link) for number, link in enumerate(links.values(), start=2)]
    ports = []
    for number, (name, link) in enumerate(hosts.items(), start=1):
        is_middle = number == 1
        ports.append(
            Port(
                name=name,
                namespace=f"{prefix}-{name}",
                address=address(number),
                hardware=hardware(number),
                outside=f"p{number}",
                ingress=f"u{number}",
                down=queues(link.down),
                up=queues(link.up),
                routes=_routes(link, nodes if is_middle else []),
                neighbours=_neighbours(nodes) if is_middle else (middle,),
            )
        )
    # A host's name has no colon in front, so that no host is called like the router.
    return Plan(router=f"{prefix}.router", ports=tuple(ports))


def needs(links: Mapping[str, Link]) -> Iterator[Need]:
    """Name each part of the kernel that these links need beyond namespaces, veth and a bridge."""
    for name, link in links.items():
        for way, direction in (("up", link.up), ("down", link.down)):
            for reason in reasons_for_netem(direction):
                yield Need(part="netem", why=f"{name} has {reason} on its way {way}")
            if direction.bits_per_s:
                rate = f"{direction.bits_per_s / 1e6:g} Mbit/s"
                yield Need(part="tbf", why=f"{name} has {rate} on its way {way}")
        if queues(link.up) != Queues():
            yield Need(part="ingress", why=f"{name} has a way up that is not perfect")
        control = link.congestion_control
        yield Need(part=control.value, why=f"{name}'s hosts use {control}")


def remarks(links: Mapping[str, Link]) -> Iterator[str]:
    """Name how each host's queues differ from what was asked, with its name."""
    for name, link in links.items():
        for way, direction in (("up", link.up), ("down", link.down)):
            for caveat in caveats(direction):
                yield f"{name}, {way}: {caveat}"


def address(number: int) -> str:
    """Return the address of the host with this number; 1 is the coordinator's."""
    return f"10.77.{number >> 8}.{number & 255}"


def hardware(number: int) -> str:
    """Return the hardware address of the host with this number."""
    return f"02:00:00:00:{number >> 8:02x}:{number & 255:02x}"


def _routes(link: Link, nodes: list[tuple[int, Link]]) -> tuple[Route, ...]:
    # Both ends of a link run its congestion control, so the coordinator has a route for each node.
    return (
        Route(destination=NETWORK, congestion_control=link.congestion_control),
        *(
            Route(destination=f"{address(number)}/32", congestion_control=node.congestion_control)
            for number, node in nodes
            if node.congestion_control != link.congestion_control
        ),
    )


def _neighbours(nodes: list[tuple[int, Link]]) -> tuple[Neighbour, ...]:
    return tuple(Neighbour(address=address(n), hardware=hardware(n)) for n, _ in nodes)

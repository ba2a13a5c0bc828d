"""A world as namespaces, veth pairs, a bridge and queues: a plan of commands, made without effects.

Theory of operation. Each host has a namespace with one device, ``eth0``; its other end stands in a
router namespace under a bridge. What goes to a host is queued at that other end. What comes from it
is led through a device of its own (ifb) before it meets the bridge and is queued there, not at
``eth0``: a queue inside the host's namespace would be charged to the sender's socket, and TCP would
hold back (TCP small queues) where a modem's queue would fill.

A direction becomes a netem, in which packets are delayed, lost, duplicated and reordered, and below
it a token bucket (tbf), which is the bottleneck with its queue. netem has a limit of its own, 1000
packets unless told, which would cut off a fast and long link without a word; it gets so much that
only the bottleneck's queue drops. A direction that needs no netem gets none, so that a link of a
rate alone works on kernels without it.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from netsim.emulation.namespaces import COORDINATOR, NamespaceHost
from netsim.link import Link, LinkDirection, transitions

BRIDGE = "br0"
HOSTS_MAX = 65_000
FRAME_BYTES = 1500 + 14
"""An IP packet and its Ethernet header."""
_INSIDE = "eth0"
_NETWORK = "10.77.0.0/16"
_LINE_BITS_PER_S = 10_000_000_000
"""Faster than anything sends here: what netem holds and how closely packets follow each other."""
_WIDEST_DEVIATIONS = 4  # A normal deviation beyond it is one in 30,000.
_BURST_MS = 1

CommandStep = tuple[Sequence[str], list[str]]
"""A program, and lines that it runs in one batch."""
Queues = tuple[str, ...]
"""Queueing disciplines of one direction, as ``tc`` reads them; packets meet the first one first."""


class KernelPart(NamedTuple):
    """A part of the kernel, and why a link needs it or why this kernel lacks it."""

    part: str
    why: str


class QueuePort(NamedTuple):
    """One host and its place at the bridge."""

    host: NamespaceHost
    link: Link
    number: int

    @property
    def outside(self) -> str:
        """The other end of the host's ``eth0``, in the router's namespace."""
        return f"p{self.number}"

    @property
    def ingress(self) -> str:
        """The device that the host's own packets are led through."""
        return f"u{self.number}"


def queues(direction: LinkDirection) -> Queues:
    """Plan the queueing disciplines of one direction."""
    netem = (_netem(direction),) if any(_netem_reasons(direction)) else ()
    return (*netem, _bucket(direction)) if direction.bits_per_s else netem


def needs(links: Mapping[str, Link]) -> Iterator[KernelPart]:
    """Name each part of the kernel that these links need beyond namespaces, veth and a bridge."""
    for name, link in links.items():
        for way, direction in (("up", link.up), ("down", link.down)):
            for reason in _netem_reasons(direction):
                yield KernelPart("netem", f"{name} has {reason} {way}")
            if direction.bits_per_s:
                rate = f"{direction.bits_per_s / 1e6:g} Mbit/s"
                yield KernelPart("tbf", f"{name} has {rate} {way}")
        if queues(link.up):
            yield KernelPart("ingress", f"{name} has a limited direction up")
        control = link.congestion_control
        yield KernelPart(control.value, f"{name}'s hosts use {control}")


def steps(router: str, ports: Sequence[QueuePort]) -> Iterator[CommandStep]:
    """Plan the commands that fill empty namespaces, in order."""
    devices, bridge, disciplines = (
        [f"link add {BRIDGE} type bridge", f"link set {BRIDGE} up"],
        [],
        [],
    )
    for port in ports:
        devices += _outside_lines(port)
        bridge.append(f"fdb add {_hardware(port.number)} dev {port.outside} master static")
        disciplines += queue_lines(port.outside, queues(port.link.down))
    yield ("ip", "-n", router), devices
    yield ("bridge", "-n", router), bridge
    yield ("tc", "-n", router), disciplines
    for port in ports:
        yield from ingress_steps(router, port)
    for port in ports:
        yield ("ip", "-n", port.host.namespace), _inside_lines(port, ports)


def change_steps(router: str, before: QueuePort, after: QueuePort) -> Iterator[CommandStep]:
    """Plan the commands that change a port's queues. Those of the same kinds keep their packets."""
    program = ("tc", "-n", router)
    old, new = queues(before.link.down), queues(after.link.down)
    yield program, _change_lines(after.outside, old, new)
    old, new = queues(before.link.up), queues(after.link.up)
    if old:
        yield program, _change_lines(after.ingress, old, new)
    else:
        yield from ingress_steps(router, after)


def ingress_steps(router: str, port: QueuePort) -> Iterator[CommandStep]:
    """Lead what a port receives through the queues of its direction up, if it has any."""
    if lines := queue_lines(port.ingress, queues(port.link.up)):
        add = f"link add {port.ingress} type ifb"
        yield ("ip", "-n", router), [add, f"link set {port.ingress} up"]
        yield ("tc", "-n", router), [*lines, *redirect_lines(port.outside, port.ingress)]


def queue_lines(device: str, disciplines: Queues, verb: str = "add") -> list[str]:
    """Put queueing disciplines at a device, the second one below the first."""
    places = ("root handle 1:", "parent 1:1 handle 2:")
    return [
        f"qdisc {verb} dev {device} {place} {words}"
        for place, words in zip(places, disciplines, strict=False)
    ]


def redirect_lines(device: str, ingress: str) -> list[str]:
    """Lead what a device receives through another one."""
    match = "parent ffff: protocol all prio 1 u32 match u32 0 0"
    return [
        f"qdisc add dev {device} handle ffff: ingress",
        f"filter add dev {device} {match} action mirred egress redirect dev {ingress}",
    ]


def _change_lines(device: str, before: Queues, after: Queues) -> list[str]:
    if before == after:
        return []
    if [words.split()[0] for words in before] == [words.split()[0] for words in after]:
        return queue_lines(device, after, "change")
    delete = [f"qdisc delete dev {device} root"] if before else []
    return [*delete, *queue_lines(device, after)]


def _netem_reasons(direction: LinkDirection) -> Iterator[str]:
    if direction.delay_us:
        yield f"a delay of {direction.delay_us / 1000:g} ms"
    if direction.jitter_us:
        yield f"a jitter of {direction.jitter_us / 1000:g} ms"
    for name in ("loss", "reordering", "duplication"):
        if share := getattr(direction, name):
            yield f"a {name} of {share:.4g}"


def _netem(direction: LinkDirection) -> str:
    """Write a netem. Zeros are left out: old versions reject 0 %."""
    longest_us = direction.delay_us + _WIDEST_DEVIATIONS * direction.jitter_us
    limit = 1000 + longest_us * _LINE_BITS_PER_S // (8 * FRAME_BYTES * 1_000_000)
    words = [f"netem limit {limit} delay {direction.delay_us}us"]
    if direction.jitter_us:
        # No correlation: netem takes the remainder of a division of the correlated number, which
        # is not correlated any more (sch_netem.c, tabledist).
        words.append(f"{direction.jitter_us}us distribution normal")
    if direction.loss:
        p, r = transitions(direction.loss, direction.burst_packets)
        words.append(f"loss gemodel {_percent(p)} {_percent(r)} 100% 0%")
    if direction.duplication:
        words.append(f"duplicate {_percent(direction.duplication)}")
    # The kernel rejects reordering where nothing waits.
    if direction.reordering and direction.delay_us:
        words.append(f"reorder {_percent(direction.reordering)}")
    if direction.jitter_us:
        # With a rate packets leave in order; without one a packet may overtake by jitter.
        words.append(f"rate {_LINE_BITS_PER_S}bit")
    return " ".join(words)


def _bucket(direction: LinkDirection) -> str:
    # A link's rate counts IP packets, the kernel counts frames.
    bits_per_s = direction.bits_per_s * FRAME_BYTES // 1500
    burst_bytes = max(2 * FRAME_BYTES, bits_per_s * _BURST_MS // 8000)
    limit_bytes = max(2 * FRAME_BYTES, bits_per_s * direction.queue_ms // 8000)
    return f"tbf rate {bits_per_s}bit burst {burst_bytes} limit {limit_bytes}"


def _percent(share: float) -> str:
    return f"{100 * share:.6f}".rstrip("0").rstrip(".") + "%"


def _outside_lines(port: QueuePort) -> list[str]:
    # One packet is one frame: a loss that takes 64 KiB of segments at a time is fiction.
    inside = f"{_INSIDE} address {_hardware(port.number)} gso_max_segs 1 netns"
    inside = f"{inside} {port.host.namespace}"
    return [
        f"link add {port.outside} gso_max_segs 1 type veth peer name {inside}",
        f"link set {port.outside} master {BRIDGE} up",
    ]


def _inside_lines(port: QueuePort, ports: Sequence[QueuePort]) -> list[str]:
    is_coordinator = port.host.name == COORDINATOR
    own = port.link.congestion_control
    # Both ends of a link run its congestion control, so the coordinator has a route for each node.
    others = [each for each in ports if each is not port] if is_coordinator else ports[:1]
    routes = [(_NETWORK, own)]
    if is_coordinator:
        controls = [(each.host.address, each.link.congestion_control) for each in others]
        routes += [(f"{address}/32", control) for address, control in controls if control != own]
    permanent = f"dev {_INSIDE} nud permanent"
    return [
        "link set lo up",
        f"link set {_INSIDE} up",
        f"address add {port.host.address}/16 dev {_INSIDE} noprefixroute",
        *(
            f"route add {destination} dev {_INSIDE} proto kernel scope link"
            f" src {port.host.address} congctl {control}"
            for destination, control in routes
        ),
        # Hardware addresses are known without a question, which could be lost.
        *(
            f"neighbour add {each.host.address} lladdr {_hardware(each.number)} {permanent}"
            for each in others
        ),
    ]


def _hardware(number: int) -> str:
    return f"02:00:00:00:{number >> 8:02x}:{number & 255:02x}"

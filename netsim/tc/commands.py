"""A plan as lines of ``ip``, ``bridge`` and ``tc`` that make it: for people and for guests."""

from collections.abc import Iterator

from netsim.namespaces.host import SETTINGS
from netsim.tc.plan import BRIDGE, INSIDE, PREFIX_BITS, Plan, Port
from netsim.tc.queues import Bucket, Netem, Queues


def commands(plan: Plan) -> Iterator[str]:
    """Write the lines in order."""
    for namespace in plan.namespaces:
        yield f"ip netns add {namespace}"
        for name, value in SETTINGS.items():
            yield f"ip netns exec {namespace} sysctl -qw {name.replace('/', '.')}='{value}'"
    yield f"ip -n {plan.router} link add {BRIDGE} type bridge"
    yield f"ip -n {plan.router} link set {BRIDGE} up"
    for port in plan.ports:
        yield from _host(plan.router, port)
        yield from queue_commands(f"tc -n {plan.router}", port.outside, port.down)
        yield from _ingress(plan.router, port)


def queue_commands(tc: str, device: str, queues: Queues) -> Iterator[str]:
    """Write the lines that put queues at a device."""
    parent = "root handle 1:"
    if queues.netem:
        yield f"{tc} qdisc add dev {device} {parent} {netem_words(queues.netem)}"
        parent = "parent 1:1 handle 2:"
    if queues.bucket:
        yield f"{tc} qdisc add dev {device} {parent} {bucket_words(queues.bucket)}"


def netem_words(netem: Netem) -> str:
    """Write a netem as ``tc`` reads it. What is zero is left out: old versions refuse 0 %."""
    words = [f"netem limit {netem.limit_packets} delay {netem.delay_us}us"]
    if netem.jitter_us:
        words.append(f"{netem.jitter_us}us distribution normal")
    if netem.loss:
        words.append(f"loss gemodel {_percent(netem.loss.p)} {_percent(netem.loss.r)} 100% 0%")
    if netem.duplication:
        words.append(f"duplicate {_percent(netem.duplication)}")
    if netem.reordering:
        words.append(f"reorder {_percent(netem.reordering)}")
    if netem.bits_per_s:
        words.append(f"rate {netem.bits_per_s}bit")
    return " ".join(words)


def bucket_words(bucket: Bucket) -> str:
    """Write a token bucket as ``tc`` reads it."""
    return f"tbf rate {bucket.bits_per_s}bit burst {bucket.burst_bytes} limit {bucket.limit_bytes}"


def _host(router: str, port: Port) -> Iterator[str]:
    outside, inside = f"ip -n {router}", f"ip -n {port.namespace}"
    # One packet is one frame: a loss that takes 64 KiB of segments at a time is fiction.
    yield (
        f"{outside} link add {port.outside} gso_max_segs 1 type veth peer name {INSIDE}"
        f" address {port.hardware} gso_max_segs 1 netns {port.namespace}"
    )
    yield f"{outside} link set {port.outside} master {BRIDGE} up"
    yield f"bridge -n {router} fdb add {port.hardware} dev {port.outside} master static"
    yield f"{inside} link set lo up"
    yield f"{inside} link set {INSIDE} up"
    yield f"{inside} address add {port.address}/{PREFIX_BITS} dev {INSIDE} noprefixroute"
    for route in port.routes:
        yield (
            f"{inside} route add {route.destination} dev {INSIDE} proto kernel scope link"
            f" src {port.address} congctl {route.congestion_control}"
        )
    for peer in port.neighbours:
        hardware = f"lladdr {peer.hardware} dev {INSIDE} nud permanent"
        yield f"{inside} neighbour add {peer.address} {hardware}"


def _ingress(router: str, port: Port) -> Iterator[str]:
    if port.up == Queues():
        return
    ip, tc = f"ip -n {router}", f"tc -n {router}"
    yield f"{ip} link add {port.ingress} type ifb"
    yield f"{ip} link set {port.ingress} up"
    yield from queue_commands(tc, port.ingress, port.up)
    yield f"{tc} qdisc add dev {port.outside} handle ffff: ingress"
    yield (
        f"{tc} filter add dev {port.outside} parent ffff: protocol all prio 1 u32 match u32 0 0"
        f" action mirred egress redirect dev {port.ingress}"
    )


def _percent(share: float) -> str:
    return f"{100 * share:.6f}".rstrip("0").rstrip(".") + "%"

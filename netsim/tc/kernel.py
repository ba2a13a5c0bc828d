"""A plan made real over netlink. Whoever calls this owns the namespaces and removes them."""

import socket
import subprocess
from functools import partial
from typing import Any

from pyroute2 import IPRoute

from netsim.namespaces.host import write_settings
from netsim.namespaces.namespaces import entered
from netsim.tc import netem_message
from netsim.tc.apart import apart
from netsim.tc.plan import BRIDGE, INSIDE, PREFIX_BITS, Plan, Port
from netsim.tc.queues import Queues

ETH_P_ALL = 3
INGRESS = "ffff:"
MATCH_ALL = "0x0/0x0+0"
UNUSED_TARGET = 0x10001
NO_PREFIX_ROUTE = 0x200
KERNEL_PROTOCOL = 2
LINK_SCOPE = 253
PERMANENT = 0x80
ONE_SEGMENT = 1
NTF_MASTER = 0x04
STATIC = 0x40
DISABLED, FORWARDING = 0, 3


def make(plan: Plan) -> None:
    """Fill the plan's empty namespaces.

    Raises:
        NetlinkError: The kernel refused; what was made until then is left to the caller to remove.
    """
    netem_message.install()
    apart(partial(_make, plan))


def change(plan: Plan, before: Port, after: Port) -> None:
    """Change the queues of one port. Those of the same shape keep what waits in them."""
    apart(partial(_change, plan, before, after))


def cut(plan: Plan, port: Port) -> None:
    """Let the bridge drop every packet from and to a port."""
    _set_port(plan, port, DISABLED)


def heal(plan: Plan, port: Port) -> None:
    """Undo a cut."""
    _set_port(plan, port, FORWARDING)


def index(name: str) -> int:
    """Return the number of a device of the namespace that the caller has entered.

    Raises:
        OSError: There is none of this name.
    """
    # pyroute2 would list all devices each time, which is quadratic in the hosts.
    return socket.if_nametoindex(name)


def add_queues(route: Any, device: int, queues: Queues, *, verb: str = "add") -> None:
    """Put queues at a device that has none, or (``change``) such of the same shape."""
    place: dict[str, Any] = {"root": True, "handle": "1:"}
    if queues.netem:
        # `parent` is the root unless said: the plug-in's own.
        route.tc(verb, "netem", device, handle="1:", netem=queues.netem)
        place = {"parent": "1:1", "handle": "2:"}
    bucket = queues.bucket
    if bucket:
        route.tc(
            verb,
            "tbf",
            device,
            rate=f"{bucket.bits_per_s}bit",
            burst=bucket.burst_bytes,
            limit=bucket.limit_bytes,
            **place,
        )


def redirect(route: Any, device: int, ingress: int) -> None:
    """Lead what a device receives through another one."""
    action = {"kind": "mirred", "direction": "egress", "action": "redirect", "ifindex": ingress}
    route.tc("add", "ingress", device, INGRESS)
    route.tc(
        "add-filter",
        "u32",
        device,
        parent=INGRESS,
        protocol=ETH_P_ALL,
        prio=1,
        target=UNUSED_TARGET,
        keys=[MATCH_ALL],
        action=action,
    )


def _make(plan: Plan) -> None:
    for port in plan.ports:
        with entered(port.namespace):
            write_settings()
    with entered(plan.router):
        write_settings()
        with IPRoute() as route:
            route.link("add", ifname=BRIDGE, kind="bridge")
            bridge = index(BRIDGE)
            route.link("set", index=bridge, state="up")
            for port in plan.ports:
                _outside(route, bridge, port)
    for port in plan.ports:
        with entered(port.namespace), IPRoute() as route:
            _inside(route, port)


def _change(plan: Plan, before: Port, after: Port) -> None:
    with entered(plan.router), IPRoute() as route:
        _requeue(route, index(after.outside), before.down, after.down)
        if before.up == after.up:
            return
        if before.up == Queues():
            _lead_through(route, after)
        else:
            _requeue(route, index(after.ingress), before.up, after.up)


def _outside(route: Any, bridge: int, port: Port) -> None:
    inside = {
        "ifname": INSIDE,
        "net_ns_fd": port.namespace,
        "address": port.hardware,
        "gso_max_segs": ONE_SEGMENT,
    }
    route.link("add", ifname=port.outside, kind="veth", gso_max_segs=ONE_SEGMENT, peer=inside)
    outside = index(port.outside)
    route.link("set", index=outside, master=bridge, state="up")
    route.fdb("add", ifindex=outside, lladdr=port.hardware, flags=NTF_MASTER, state=STATIC)
    add_queues(route, outside, port.down)
    if port.up != Queues():
        _lead_through(route, port)


def _lead_through(route: Any, port: Port) -> None:
    route.link("add", ifname=port.ingress, kind="ifb")
    ingress = index(port.ingress)
    route.link("set", index=ingress, state="up")
    add_queues(route, ingress, port.up)
    redirect(route, index(port.outside), ingress)


def _inside(route: Any, port: Port) -> None:
    route.link("set", index=index("lo"), state="up")
    device = index(INSIDE)
    route.link("set", index=device, state="up")
    address = {"address": port.address, "prefixlen": PREFIX_BITS, "flags": NO_PREFIX_ROUTE}
    route.addr("add", index=device, **address)
    for way in port.routes:
        route.route(
            "add",
            dst=way.destination,
            oif=device,
            scope=LINK_SCOPE,
            proto=KERNEL_PROTOCOL,
            prefsrc=port.address,
            # pyroute2 passes over metrics that it has no name for; `congctl` is one.
            metrics={"cc_algo": way.congestion_control.value},
        )
    for peer in port.neighbours:
        route.neigh("add", dst=peer.address, lladdr=peer.hardware, ifindex=device, state=PERMANENT)


def _requeue(route: Any, device: int, before: Queues, after: Queues) -> None:
    if before == after:
        return
    if (before.netem is None, before.bucket is None) == (after.netem is None, after.bucket is None):
        add_queues(route, device, after, verb="change")
        return
    if before != Queues():
        route.tc("delete", index=device, root=True)
    add_queues(route, device, after)


def _set_port(plan: Plan, port: Port, state: int) -> None:
    # pyroute2's `state` of a port of a bridge takes the device itself down, which its host sees.
    words = ["bridge", "-n", plan.router, "link", "set", "dev", port.outside, "state", str(state)]
    subprocess.run(words, check=True, capture_output=True)

"""What this kernel can do, found by doing it in a namespace of our own.

The program ``tc`` may be there while the kernel knows none of its queues, so nothing is concluded
from programs, versions or lists of modules.
"""

import os
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import msgspec
from pyroute2 import IPRoute
from pyroute2.netlink.exceptions import NetlinkError

from hypergpu.units import Microseconds
from netsim.error import NetsimError
from netsim.link.link import CongestionControl
from netsim.namespaces import namespaces, ownership
from netsim.tc import kernel, netem_message
from netsim.tc.apart import apart
from netsim.tc.choice import Lack
from netsim.tc.plan import BRIDGE
from netsim.tc.queues import Bucket, Netem, Queues

VETH, IFB, LOOPBACK = "veth0", "ifb0", 1
NO_ENTRY = 2
ROUTE = "192.0.2.0/24"  # RFC 5737: documentation, on no real network
NETEM = Netem(
    delay_us=Microseconds(1000),
    jitter_us=Microseconds(0),
    loss=None,
    reordering=0.0,
    duplication=0.0,
    bits_per_s=0,
    limit_packets=1000,
)
BUCKET = Bucket(bits_per_s=1_000_000, burst_bytes=4000, limit_bytes=10_000)

Attempt = Callable[[Any], object]


class Capabilities(msgspec.Struct, frozen=True, kw_only=True):
    """The parts that were tried, and those of them that failed."""

    tried: tuple[str, ...]
    lacks: tuple[Lack, ...]


def capabilities() -> Capabilities:
    """Try every part. Needs root; leaves nothing behind.

    Raises:
        NetsimError: Not even a namespace can be made.
    """
    require_root()
    netem_message.install()
    ownership.clean()
    claim = ownership.claim()
    scratch = f"netsim-{claim.slot}.scratch"
    try:
        namespaces.require_free([scratch])
        claim.write([scratch])
        namespaces.create([scratch])
        return apart(partial(_tried_in, scratch))
    finally:
        claim.remove_everything()
        claim.release()


def require_root() -> None:
    """Refuse everybody else before anything is made."""
    if os.geteuid() != 0:
        fix = "use sudo, or use the proxy, which needs nothing"
        raise NetsimError("tc needs root for network namespaces", fix)


def _tried_in(scratch: str) -> Capabilities:
    attempts = tuple(_attempts())
    with namespaces.entered(scratch), IPRoute() as route:
        lacks = tuple(lack for part, attempt in attempts for lack in _tried(route, part, attempt))
    return Capabilities(tried=tuple(part for part, _ in attempts), lacks=lacks)


def _attempts() -> Iterator[tuple[str, Attempt]]:
    # Each later one stands on what the earlier ones left, and fails with its own reason without it.
    yield "bridge", lambda route: route.link("add", ifname=BRIDGE, kind="bridge")
    yield "veth", lambda route: route.link("add", ifname=VETH, kind="veth", peer="veth1")
    yield "netem", lambda route: _queued(route, Queues(netem=NETEM))
    yield "tbf", lambda route: _queued(route, Queues(bucket=BUCKET))
    yield "ingress", _redirected
    for control in CongestionControl:
        yield control.value, partial(_routed, control)


def _queued(route: Any, queues: Queues) -> None:
    device = kernel.index(VETH)
    kernel.add_queues(route, device, queues)
    route.tc("delete", index=device, root=True)


def _redirected(route: Any) -> None:
    route.link("add", ifname=IFB, kind="ifb")
    kernel.redirect(route, kernel.index(VETH), kernel.index(IFB))


def _routed(control: CongestionControl, route: Any) -> None:
    route.link("set", index=LOOPBACK, state="up")
    metrics = {"cc_algo": control.value}
    route.route("replace", dst=ROUTE, oif=LOOPBACK, scope=kernel.LINK_SCOPE, metrics=metrics)


def _tried(route: Any, part: str, attempt: Attempt) -> Iterator[Lack]:
    try:
        attempt(route)
    except NetlinkError as error:
        # pyroute2 drops the kernel's own words, which are "Specified qdisc kind is unknown" here.
        said = "it does not know this kind" if error.code == NO_ENTRY else str(error.args[-1])
        yield Lack(part=part, why=said)
    except OSError:
        yield Lack(part=part, why="a device that it needs is missing")

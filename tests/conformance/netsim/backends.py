"""Every way to run a bad network, for one suite: ask for a link, measure it.

A backend is a name, what it claims, and a context in which one node's link is open as a
``netsim.measure.network.Network``. To add one, write a class like ``TunnelBackend`` (a backend
whose ends can run programs gives two ``MeasuredPath`` to ``ProgramNetwork``; one in virtual time
implements the five methods itself) and add it to ``BACKENDS``. Each test runs for every backend
that claims what the test is about, and for no other.

The machine may be busy. A backend says itself whether it kept its times (``verdict``); the tests
assert what must hold even when it did not, and more when it did.
"""

import os
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Protocol

from hypergpu.units import Microseconds
from netsim.error import NetsimError
from netsim.link.link import Direction, Link
from netsim.link.shape import Shape
from netsim.link.trace import Trace
from netsim.measure.network import Claim, Network
from netsim.proxy.measured import measured
from netsim.tc.capabilities import capabilities
from netsim.tc.measured import claims
from netsim.tc.measured import network as queue_network
from netsim.tc.traffic_control import TrafficControl
from netsim.tunnel.measured import network
from netsim.tunnel.requirements import require_machine
from netsim.tunnel.tunnel import Tunnel

FREE = Direction(delay_us=Microseconds(0), bits_per_s=0)
"""The coordinator's, so that only the node's link is measured."""


class Backend(Protocol):
    """One way to run a bad network."""

    name: str
    claims: frozenset[Claim]

    def opened(
        self, link: Link, *, seed: int, traces: tuple[Trace, ...] = ()
    ) -> AbstractAsyncContextManager[Network]:
        """Open the link of one node; a backend that does not claim traces is asked for none."""


class TunnelBackend:
    """Real packets; root and /dev/net/tun."""

    name = "tunnel"
    claims = frozenset(Claim)

    @asynccontextmanager
    async def opened(
        self, link: Link, *, seed: int, traces: tuple[Trace, ...] = ()
    ) -> AsyncIterator[Network]:
        """Open a tunnel with one node."""
        shape = Shape(link=link, traces=traces)
        async with Tunnel({"node-0": shape}, Link(up=FREE, down=FREE), seed=seed) as tunnel:
            yield network(tunnel, "node-0")


class ProxyBackend:
    """Proxies on loopback. They carry no packets, so real congestion control meets no loss."""

    name = "proxy"
    claims = frozenset(Claim) - {Claim.CONGESTION}

    @asynccontextmanager
    async def opened(
        self, link: Link, *, seed: int, traces: tuple[Trace, ...] = ()
    ) -> AsyncIterator[Network]:
        """Open proxies for one node."""
        shape = Shape(link=link, traces=traces)
        async with measured(shape, coordinator=Link(up=FREE, down=FREE), seed=seed) as network:
            yield network


class QueueBackend:
    """The kernel's own queues; root, and what this very kernel has of them."""

    name = "tc"

    def __init__(self) -> None:
        try:
            self.claims = claims(capabilities().lacks)
        except NetsimError:
            self.claims = frozenset()

    @asynccontextmanager
    async def opened(
        self, link: Link, *, seed: int, traces: tuple[Trace, ...] = ()
    ) -> AsyncIterator[Network]:
        """Open a network with one node; the kernel throws its own dice."""
        async with TrafficControl({"node-0": link}, Link(up=FREE, down=FREE)) as control:
            yield queue_network(control, "node-0")


def can_tunnel() -> bool:
    """Whether this machine can build a tunnel. CI must, so there every test of it runs."""
    try:
        require_machine()
    except NetsimError:
        return bool(os.environ.get("CI"))
    return True


BACKENDS: tuple[Backend, ...] = (
    ProxyBackend(),
    *([TunnelBackend()] if can_tunnel() else []),
    QueueBackend(),
)


def claiming(*claims: Claim) -> list[Backend]:
    """Return the backends that claim all of these."""
    return [backend for backend in BACKENDS if backend.claims >= set(claims)]

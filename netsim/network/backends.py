"""The table of backends: how each opens links for programs, and what it emulates faithfully."""

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import NamedTuple, Protocol

import msgspec

from hypergpu.sites import Site, Sites
from hypergpu.wire.free_ports import free_ports
from netsim.emulation.namespaces import COORDINATOR, NamespaceNetwork
from netsim.emulation.requests import LinkRequest, require_no_nat
from netsim.link import COORDINATOR_LINK, UNLIMITED, NetsimError, PairDelay, Shape
from netsim.measure.lateness import Lateness
from netsim.measure.probe import BackendClaim, ProbedLink
from netsim.network.options import Backend, Fallback
from netsim.network.pairs import require_no_pairs
from netsim.network.profiles import profile
from netsim.network.world import WorldDescription
from netsim.proxy.process import (
    LOOPBACK,
    Forward,
    ProxiedNode,
    ProxyPlan,
    ProxyProcess,
    ProxyProtocol,
    probed_proxy,
)
from netsim.tc import traffic_control
from netsim.tc.plan import KernelPart, needs
from netsim.tc.traffic_control import TrafficControl, missing_part
from netsim.tunnel.tunnel import Tunnel, require_tunnel

_PROXIED_MAX = 250 * 250
_PORTS = 3
"""How many ports of the coordinator nodes dial."""
_NODE = "node-0"


class Links(msgspec.Struct, frozen=True, kw_only=True):
    """The links that a backend opens: each node's link and the coordinator's own."""

    nodes: Mapping[str, Shape]
    coordinator: Shape = Shape(link=COORDINATOR_LINK)
    seed: int = 0
    pairs: tuple[PairDelay, ...] = ()
    """Nodes between which the way is another than through the middle."""


class LinkOwner(Protocol):
    """The part of a backend that changes and judges its open links."""

    async def obey(self, request: LinkRequest) -> object:
        """Carry out a request and return the answer."""

    async def lateness(self) -> Lateness | None:
        """Return how late the links were so far; None: they cannot be late."""


class OpenLinks(NamedTuple):
    """Links that are open: where programs run, and who changes the links."""

    sites: Sites
    owner: LinkOwner


class BackendEntry(NamedTuple):
    """One row of the table."""

    open: Callable[[Links], AbstractAsyncContextManager[OpenLinks]]
    probe: Callable[[Shape, int], AbstractAsyncContextManager[ProbedLink]]
    """Opens a link of one node only to measure it; the number seeds its losses."""
    claims: Callable[[], frozenset[BackendClaim]]
    limits: Callable[[], str]
    """What this machine cannot do for it; empty: nothing. Raises where it cannot run at all."""


def node_address(number: int) -> str:
    """Return the loopback address at which the node of this number, from 0, finds its proxy."""
    return f"127.77.{number // 250}.{number % 250 + 1}"


@asynccontextmanager
async def _open_proxy(links: Links) -> AsyncIterator[OpenLinks]:
    """Open a process of proxies: each node dials an address of its own in 127.0.0.0/8."""
    require_no_pairs(links.pairs, "the proxy")
    if len(links.nodes) > _PROXIED_MAX:
        raise NetsimError(f"{len(links.nodes)} nodes", f"proxy carries up to {_PROXIED_MAX}")
    ports = free_ports(_PORTS)
    forwards = tuple(
        Forward(target_port=port, port=port, protocol=protocol)
        for port in ports
        for protocol in ProxyProtocol
    )
    nodes = tuple(
        ProxiedNode(name=name, shape=shape, forwards=forwards, listen=node_address(number))
        for number, (name, shape) in enumerate(links.nodes.items())
    )
    sites = Sites(
        backend=Backend.PROXY,
        coordinator=Site(dials=LOOPBACK),
        nodes={node.name: Site(dials=node.listen) for node in nodes},
        ports=ports,
    )
    plan = ProxyPlan(nodes=nodes, coordinator=links.coordinator.link, seed=links.seed)
    async with ProxyProcess(plan) as proxies:
        yield OpenLinks(sites, proxies)


@asynccontextmanager
async def _open_namespaces(
    backend: Backend, network: NamespaceNetwork, nodes: Sequence[str]
) -> AsyncIterator[OpenLinks]:
    async with network:
        address = network.host(COORDINATOR).address

        def site(name: str) -> Site:
            return Site(prefix=tuple(network.host(name).command(())), dials=address)

        sites = Sites(
            backend=backend,
            coordinator=site(COORDINATOR),
            nodes={name: site(name) for name in nodes},
        )
        yield OpenLinks(sites, network)


def _open_tunnel(links: Links) -> AbstractAsyncContextManager[OpenLinks]:
    tunnel = Tunnel(links.nodes, links.coordinator, seed=links.seed, pairs=links.pairs)
    return _open_namespaces(Backend.TUNNEL, tunnel, tuple(links.nodes))


def _open_tc(links: Links) -> AbstractAsyncContextManager[OpenLinks]:
    require_no_pairs(links.pairs, "tc")
    network = TrafficControl(links.nodes, links.coordinator)
    return _open_namespaces(Backend.TC, network, tuple(links.nodes))


@asynccontextmanager
async def _probe_namespaces(network: NamespaceNetwork) -> AsyncIterator[ProbedLink]:
    async with network:
        yield network.probe(_NODE)


def _tunnel_limits() -> str:
    require_tunnel()
    return ""


def _tc_limits() -> str:
    return "; ".join(f"no {part}: {why}" for part, why in traffic_control.kernel_lacks())


BACKENDS: Mapping[Backend, BackendEntry] = {
    Backend.PROXY: BackendEntry(
        open=_open_proxy,
        probe=lambda shape, seed: probed_proxy(shape, coordinator=UNLIMITED, seed=seed),
        claims=lambda: frozenset(BackendClaim) - {BackendClaim.CONGESTION},
        limits=lambda: "",
    ),
    Backend.TUNNEL: BackendEntry(
        open=_open_tunnel,
        probe=lambda shape, seed: _probe_namespaces(Tunnel({_NODE: shape}, UNLIMITED, seed=seed)),
        claims=lambda: frozenset(BackendClaim),
        limits=_tunnel_limits,
    ),
    Backend.TC: BackendEntry(
        open=_open_tc,
        probe=lambda shape, _seed: _probe_namespaces(TrafficControl({_NODE: shape}, UNLIMITED)),
        claims=traffic_control.claims,
        limits=_tc_limits,
    ),
}


def choose_backend(backend: Backend, links: Links, fallback: Fallback) -> tuple[Backend, str]:
    """Choose a backend for links: the requested one, or the tunnel where that is the fallback.

    Returns:
        The backend, and why it is not the requested one; empty when it is.

    Raises:
        NetsimError: The kernel lacks what the links need and no fallback was requested, a fallback
            was requested for a backend that has none, or the proxy for a node behind a NAT or for
            delays of pairs.
    """
    if backend is not Backend.TC:
        if fallback is not Fallback.REFUSE:
            fix = f"leave out --fallback, or use --backend {Backend.TC}"
            raise NetsimError(f"the backend {backend} has no fallback", fix)
        if backend is Backend.PROXY:
            # The proxies would, too, but only once they are started.
            for name, shape in links.nodes.items():
                require_no_nat(name, shape, "the proxy")
            require_no_pairs(links.pairs, "the proxy")
        return backend, ""
    shapes = {COORDINATOR: links.coordinator, **links.nodes}
    varying_part = KernelPart(
        "queues that vary by themselves", "the tunnel and the proxy have them"
    )
    nat_part = KernelPart("NATs", "the tunnel has them")
    pair_part = KernelPart("delays of pairs", "the tunnel has them")
    needed_parts = [
        *(
            pair_part._replace(why=f"{pair.first} and {pair.second} have one")
            for pair in links.pairs
        ),
        *(
            nat_part._replace(why=f"{name} stands behind a NAT")
            for name, shape in shapes.items()
            if shape.nat is not None
        ),
        *(
            varying_part._replace(why=f"the link of {name} varies by itself")
            for name, shape in shapes.items()
            if shape.varies
        ),
        *needs({name: shape.link for name, shape in shapes.items()}),
    ]
    reason = missing_part(
        needed_parts, [*traffic_control.kernel_lacks(), pair_part, nat_part, varying_part]
    )
    if not reason:
        return backend, ""
    if fallback is Fallback.TUNNEL:
        return Backend.TUNNEL, reason
    fix = "use the fallback to the tunnel (--fallback tunnel), or another kernel"
    raise NetsimError(reason, fix)


def profile_links(names: Sequence[str], seed: int) -> Links:
    """Return one node for each profile; a profile that comes twice is numbered.

    Raises:
        NetsimError: There is no such profile.
    """
    profiles = [profile(name) for name in names]
    nodes: dict[str, Shape] = {}
    for place, each in enumerate(profiles):
        earlier = sum(other is each for other in profiles[:place])
        is_numbered = sum(other is each for other in profiles) > 1
        name = f"{each.name}-{earlier + 1}" if is_numbered else each.name
        nodes[name] = each.shape
    return Links(nodes=nodes, seed=seed)


def world_links(world: WorldDescription) -> Links:
    """Return each node's link with what varies it; faults are not the links'."""
    return Links(
        nodes={node.name: node.shape for node in world.nodes},
        coordinator=Shape(link=world.coordinator),
        seed=world.seed,
        pairs=world.pairs,
    )

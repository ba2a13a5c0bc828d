"""Links through proxies on loopback: every node dials an address of its own in 127.0.0.0/8."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from hypergpu.sites import Site, Sites
from hypergpu.wire.ports import free_ports
from netsim.error import NetsimError
from netsim.link.link import Link
from netsim.measure.network import Verdict
from netsim.network.ground.backend import Backend
from netsim.network.ground.interface import Links
from netsim.proxy.messages import LOOPBACK, Forward, Plan, Protocol, Proxied
from netsim.proxy.process import ProxyProcess

NODES_MAX = 250 * 250


class ProxyGround:
    """Proxies in a process of their own, and what is told of them."""

    def __init__(self, proxies: ProxyProcess, sites: Sites) -> None:
        self.sites = sites
        self._proxies = proxies

    async def set(self, name: str, link: Link) -> None:
        """See `Ground`."""
        await self._proxies.set(name, link)

    async def cut(self, name: str) -> None:
        """See `Ground`."""
        await self._proxies.cut(name)

    async def heal(self, name: str) -> None:
        """See `Ground`."""
        await self._proxies.heal(name)

    async def reset(self, name: str) -> None:
        """See `Ground`."""
        await self._proxies.reset(name)

    async def verdict(self) -> Verdict:
        """See `Ground`."""
        lateness = (await self._proxies.statistics()).lateness
        return Verdict(is_valid=lateness.is_valid, sentence=lateness.verdict())


def node_address(number: int) -> str:
    """The loopback address at which the node of this number, from 0, finds the coordinator."""
    return f"127.77.{number // 250}.{number % 250 + 1}"


@asynccontextmanager
async def proxy_ground(links: Links) -> AsyncIterator[ProxyGround]:
    """Open proxies and close them behind the block."""
    if len(links.nodes) > NODES_MAX:
        raise NetsimError(f"{len(links.nodes)} nodes", f"proxy carries up to {NODES_MAX}")
    ports = free_ports(links.ports)
    forwards = tuple(
        Forward(target_port=port, port=port, protocol=protocol)
        for port in ports
        for protocol in (Protocol.TCP, Protocol.UDP)
    )
    nodes = tuple(
        Proxied(
            name=name,
            link=shape.link,
            forwards=forwards,
            listen=node_address(number),
            variation=shape.variation,
            traces=shape.traces,
            starts_at_hour=shape.starts_at_hour,
        )
        for number, (name, shape) in enumerate(links.nodes.items())
    )
    sites = Sites(
        backend=Backend.PROXY,
        coordinator=Site(dials=LOOPBACK),
        nodes={node.name: Site(dials=node.listen) for node in nodes},
        ports=ports,
    )
    plan = Plan(nodes=nodes, coordinator=links.coordinator.link, seed=links.seed)
    async with ProxyProcess(plan) as proxies:
        yield ProxyGround(proxies, sites)

"""Links of real packets: every site is a network namespace behind the user-space router."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from hypergpu.sites import Site, Sites
from netsim.error import NetsimError
from netsim.link.link import Link
from netsim.measure.lateness import Lateness
from netsim.measure.network import Verdict
from netsim.namespaces.host import COORDINATOR
from netsim.network.ground.backend import Backend
from netsim.network.ground.interface import Links
from netsim.tunnel.tunnel import Tunnel


class TunnelGround:
    """An open tunnel and what is told of it."""

    def __init__(self, tunnel: Tunnel, sites: Sites) -> None:
        self.sites = sites
        self._tunnel = tunnel

    async def set(self, name: str, link: Link) -> None:
        """See `Ground`."""
        await self._tunnel.set(name, link)

    async def cut(self, name: str) -> None:
        """See `Ground`."""
        await self._tunnel.cut(name)

    async def heal(self, name: str) -> None:
        """See `Ground`."""
        await self._tunnel.heal(name)

    async def reset(self, name: str) -> None:
        """See `Ground`."""
        what = f"the tunnel carries packets and knows no connection of {name} to reset"
        raise NetsimError(what, "cut the link for a moment, or use the proxy backend")

    async def verdict(self) -> Verdict:
        """See `Ground`."""
        lateness: Lateness = (await self._tunnel.statistics()).lateness
        return Verdict(is_valid=lateness.is_valid, sentence=lateness.verdict())


@asynccontextmanager
async def tunnel_ground(links: Links) -> AsyncIterator[TunnelGround]:
    """Open a tunnel and remove it behind the block."""
    async with Tunnel(links.nodes, links.coordinator, seed=links.seed) as tunnel:
        address = tunnel.address(COORDINATOR)

        def site(name: str) -> Site:
            return Site(prefix=tuple(tunnel.host(name).command(())), dials=address)

        sites = Sites(
            backend=Backend.TUNNEL,
            coordinator=site(COORDINATOR),
            nodes={name: site(name) for name in links.nodes},
        )
        yield TunnelGround(tunnel, sites)

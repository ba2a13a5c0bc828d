"""Links of real packets through the kernel's own queues: every site is a network namespace."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from hypergpu.sites import Site, Sites
from netsim.ground.backend import Backend
from netsim.ground.interface import Links
from netsim.link.course import Variation
from netsim.link.link import Link
from netsim.measure.network import ALWAYS_VALID, Verdict
from netsim.refusal import RefusedError
from netsim.tc.plan import COORDINATOR
from netsim.tc.traffic_control import TrafficControl
from netsim.tunnel.shape import Shape


class QueueGround:
    """An open network of queues and what is told of it."""

    def __init__(self, network: TrafficControl, sites: Sites) -> None:
        self.sites = sites
        self._network = network

    async def set(self, name: str, link: Link) -> None:
        """See `Ground`."""
        await self._network.set(name, link)

    async def cut(self, name: str) -> None:
        """See `Ground`."""
        await self._network.cut(name)

    async def heal(self, name: str) -> None:
        """See `Ground`."""
        await self._network.heal(name)

    async def reset(self, name: str) -> None:
        """See `Ground`."""
        what = f"the kernel's queues know no connection of {name} to reset"
        raise RefusedError(what, "cut the link for a moment, or use the proxy backend")

    async def verdict(self) -> Verdict:
        """See `Ground`. What the queues do otherwise than asked stands beside it."""
        remarks = "; ".join(self._network.remarks)
        sentence = f"{ALWAYS_VALID.sentence}. {remarks}" if remarks else ALWAYS_VALID.sentence
        return Verdict(is_valid=True, sentence=sentence)


@asynccontextmanager
async def queue_ground(links: Links) -> AsyncIterator[QueueGround]:
    """Open a network of queues and remove it behind the block."""
    nodes = {name: _steady(name, shape) for name, shape in links.nodes.items()}
    coordinator = _steady(COORDINATOR, links.coordinator)
    async with TrafficControl(nodes, coordinator) as network:
        address = network.address(COORDINATOR)

        def site(name: str) -> Site:
            return Site(prefix=tuple(network.host(name).command(())), dials=address)

        sites = Sites(
            backend=Backend.TC,
            coordinator=site(COORDINATOR),
            nodes={name: site(name) for name in nodes},
        )
        yield QueueGround(network, sites)


def _steady(name: str, shape: Shape) -> Link:
    if shape.variation != Variation() or shape.traces:
        raise RefusedError(
            f"the link of {name} changes by itself, and tc holds a link as it is",
            "use the tunnel, or a profile that does not vary",
        )
    return shape.link

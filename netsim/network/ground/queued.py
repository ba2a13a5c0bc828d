"""Links of real packets through the kernel's own queues, where the kernel has them."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from hypergpu.sites import Site, Sites
from netsim.error import NetsimError
from netsim.link import Link, Variation
from netsim.link.shape import Shape
from netsim.measure.network import ALWAYS_VALID, Verdict
from netsim.namespaces.host import COORDINATOR
from netsim.network.ground.backend import Backend
from netsim.network.ground.interface import Links
from netsim.tc.traffic_control import TrafficControl


class QueueGround:
    """An open network of the kernel and what is told of it."""

    def __init__(self, control: TrafficControl, sites: Sites) -> None:
        self.sites = sites
        self._control = control

    async def set(self, name: str, link: Link) -> None:
        """See `Ground`."""
        await self._control.set(name, link)

    async def cut(self, name: str) -> None:
        """See `Ground`."""
        await self._control.cut(name)

    async def heal(self, name: str) -> None:
        """See `Ground`."""
        await self._control.heal(name)

    async def reset(self, name: str) -> None:
        """See `Ground`."""
        what = f"the kernel carries packets and knows no connection of {name} to reset"
        raise NetsimError(what, "cut the link for a moment, or use the proxy backend")

    async def verdict(self) -> Verdict:
        """See `Ground`. The kernel keeps its times."""
        return ALWAYS_VALID


@asynccontextmanager
async def queue_ground(links: Links) -> AsyncIterator[QueueGround]:
    """Make the network and remove it behind the block.

    Raises:
        NetsimError: The kernel lacks what the links need, or a link changes by itself.
    """
    for name, shape in links.nodes.items():
        _refuse_changing(name, shape)
    nodes = {name: shape.link for name, shape in links.nodes.items()}
    async with TrafficControl(nodes, links.coordinator.link) as control:
        address = control.address(COORDINATOR)

        def site(name: str) -> Site:
            return Site(prefix=tuple(control.host(name).command(())), dials=address)

        sites = Sites(
            backend=Backend.TC,
            coordinator=site(COORDINATOR),
            nodes={name: site(name) for name in nodes},
        )
        yield QueueGround(control, sites)


def _refuse_changing(name: str, shape: Shape) -> None:
    if shape.traces or shape.variation != Variation():
        what = f"the link of {name} changes by itself, which tc does not do"
        raise NetsimError(what, "use the tunnel or the proxy, or a profile that stays as it is")

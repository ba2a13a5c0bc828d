"""One link of any backend, opened only to be measured."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from netsim.link import UNLIMITED, Link
from netsim.link.shape import Shape
from netsim.measure.network import Claim, Network
from netsim.network.ground.backend import Backend
from netsim.proxy.measured import measured
from netsim.tunnel.measured import network
from netsim.tunnel.tunnel import Tunnel

_NODE = "node-0"


def claims_of(backend: Backend) -> frozenset[Claim]:
    """What a backend does faithfully on this machine.

    Raises:
        NetsimError: It cannot be found out here.
    """
    match backend:
        case Backend.PROXY:
            return frozenset(Claim) - {Claim.CONGESTION}
        case Backend.TUNNEL:
            return frozenset(Claim)
        case Backend.TC:
            # Its library takes long to import, and no other backend needs it.
            from netsim.tc.capabilities import capabilities
            from netsim.tc.measured import claims

            return claims(capabilities().lacks)


@asynccontextmanager
async def measurable(backend: Backend, link: Link, *, seed: int = 0) -> AsyncIterator[Network]:
    """Open a link of one node.

    Raises:
        NetsimError: The backend cannot do what is asked, or cannot run here.
    """
    match backend:
        case Backend.PROXY:
            async with measured(Shape(link=link), coordinator=UNLIMITED, seed=seed) as opened:
                yield opened
        case Backend.TUNNEL:
            async with Tunnel({_NODE: link}, UNLIMITED, seed=seed) as tunnel:
                yield network(tunnel, _NODE)
        case Backend.TC:
            from netsim.tc.measured import network as queue_network
            from netsim.tc.traffic_control import TrafficControl

            async with TrafficControl({_NODE: link}, UNLIMITED) as control:
                yield queue_network(control, _NODE)

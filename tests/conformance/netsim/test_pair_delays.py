"""Real packets between two nodes of a tunnel that have a delay of their own."""

import asyncio

import pytest

from hypergpu.units import Microseconds
from netsim.emulation.namespaces import COORDINATOR
from netsim.link import UNLIMITED, Link, LinkDirection, NatKind, PairDelay, Shape
from netsim.tunnel.tunnel import Tunnel
from tests.conformance.netsim.test_nats import PORT, REFLECTOR, program

pytestmark = pytest.mark.needs("tunnel")

LINK_MS, PAIR_MS = 1_000, 20
ASKER = """
import socket, sys, time
sock = socket.socket(type=socket.SOCK_DGRAM)
began_s = time.monotonic()
sock.sendto(b"where am I", (sys.argv[1], int(sys.argv[2])))
sock.recvfrom(2000)
print(round(1000 * (time.monotonic() - began_s)), flush=True)
"""


async def trip_ms(tunnel: Tunnel, source: str, target: str) -> int:
    """The round trip of one packet between two hosts."""
    async with program(tunnel, target, REFLECTOR, str(PORT)) as reflector:
        assert await reflector.read() == "ready"
        address = tunnel.host(target).address
        async with program(tunnel, source, ASKER, address, str(PORT)) as asker:
            return int(await asker.read())


@pytest.mark.parametrize("nat", [None, NatKind.FULL_CONE])
async def test_a_pair_is_as_near_as_it_says_and_the_coordinator_as_far_as_its_links(
    nat: NatKind | None,
) -> None:
    way = LinkDirection(delay_us=Microseconds(1000 * LINK_MS), bits_per_s=0)
    shape = Shape(link=Link(up=way, down=way))
    shapes = {
        "a": Shape(link=shape.link, nat=nat),
        "b": shape,
        "c": shape,
    }
    pairs = [PairDelay("a", "b", Microseconds(1000 * PAIR_MS))]
    async with Tunnel(shapes, UNLIMITED, pairs=pairs) as tunnel:
        near_ms, far_ms, coordinator_ms = await asyncio.gather(
            *(trip_ms(tunnel, "a", target) for target in ("b", "c", COORDINATOR))
        )
    assert 2 * PAIR_MS <= near_ms < 2 * LINK_MS
    assert 2 * LINK_MS <= coordinator_ms < 4 * LINK_MS
    assert far_ms >= 4 * LINK_MS

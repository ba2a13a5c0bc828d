"""Links through proxies on loopback: every node dials an address of its own in 127.0.0.0/8."""

import itertools
import random
import socket
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path

from hypergpu.sites import Site, Sites
from netsim.ground.backend import Backend
from netsim.ground.interface import Links
from netsim.link.link import Link
from netsim.measure.network import Verdict
from netsim.proxy.messages import LOOPBACK, Forward, Plan, Protocol, Proxied
from netsim.proxy.process import ProxyProcess
from netsim.refusal import RefusedError

NODES_MAX = 250 * 250
_FIRST, _LAST = 20_000, 32_000


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


def free_ports(count: int) -> tuple[int, ...]:
    """Ports that nobody has now, TCP or UDP, at any address.

    The kernel gives them to no connection meanwhile, unless all below its own are taken.
    """
    last = min(_LAST, _first_ephemeral() - 1)
    candidates = list(range(_FIRST, last + 1))
    random.SystemRandom().shuffle(candidates)
    found = tuple(itertools.islice(filter(_is_free, candidates), count))
    return found if len(found) == count else _ephemeral_ports(count)


def _first_ephemeral() -> int:
    try:
        return int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text("ascii").split()[0])
    except (OSError, ValueError, IndexError):
        return _LAST + 1


def _is_free(port: int) -> bool:
    """Whether it can be had at every address, which includes those that nodes dial."""
    for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM):
        with socket.socket(socket.AF_INET, kind) as probe:
            try:
                probe.bind(("", port))
            except OSError:
                return False
    return True


def _ephemeral_ports(count: int) -> tuple[int, ...]:
    with ExitStack() as held:
        ports: list[int] = []
        while len(ports) < count:
            taken = held.enter_context(socket.socket())
            taken.bind((LOOPBACK, 0))
            ports.append(taken.getsockname()[1])
    return tuple(ports)


@asynccontextmanager
async def proxy_ground(links: Links) -> AsyncIterator[ProxyGround]:
    """Open proxies and close them behind the block."""
    if len(links.nodes) > NODES_MAX:
        raise RefusedError(f"{len(links.nodes)} nodes", f"proxy carries up to {NODES_MAX}")
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

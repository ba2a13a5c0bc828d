"""Proxies as a network that can be measured like every other."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from hypergpu.wire.ports import free_ports
from netsim.link.link import Link
from netsim.link.shape import COORDINATOR_LINK, Shape, Way
from netsim.measure.lateness import Lateness
from netsim.measure.network import ALWAYS_VALID, ProgramNetwork, Verdict
from netsim.measure.path import MeasuredPath, here
from netsim.proxy.messages import LOOPBACK, Dialler, Forward, Plan, Protocol, Proxied
from netsim.proxy.process import ProxyProcess

_NODE = "node-0"


@asynccontextmanager
async def measured(
    shape: Shape, *, coordinator: Link = COORDINATOR_LINK, seed: int = 0
) -> AsyncIterator[ProgramNetwork]:
    """Open one node's proxy, in a process of its own, only to measure through it."""
    # TCP and UDP under one number each, so that a path is one address whatever is measured.
    up, down, dialled_up, dialled_down = free_ports(4)
    forwards = tuple(
        Forward(target_port=port, port=dialled, protocol=protocol, dialler=dialler)
        for port, dialled, dialler in (
            (up, dialled_up, Dialler.NODE),
            (down, dialled_down, Dialler.COORDINATOR),
        )
        for protocol in Protocol
    )
    node = Proxied(
        name=_NODE,
        link=shape.link,
        forwards=forwards,
        variation=shape.variation,
        traces=shape.traces,
        starts_at_hour=shape.starts_at_hour,
    )
    async with ProxyProcess(Plan(nodes=(node,), coordinator=coordinator, seed=seed)) as proxies:
        ways: dict[Way, MeasuredPath] = {
            "up": _path(up, dialled_up),
            "down": _path(down, dialled_down),
        }
        yield ProgramNetwork(ways, _Judge(proxies).verdict)


class _Judge:
    """Gives a verdict on what was added since the last one."""

    def __init__(self, proxies: ProxyProcess) -> None:
        self._proxies = proxies
        self._judged = Lateness()

    async def verdict(self) -> Verdict:
        lateness = (await self._proxies.statistics()).lateness
        added, self._judged = lateness.since(self._judged), lateness
        if not added.packets:
            return ALWAYS_VALID
        return Verdict(is_valid=added.is_valid, sentence=added.verdict())


def _path(port: int, dialled: int) -> MeasuredPath:
    return MeasuredPath(
        at_sender=here,
        at_receiver=here,
        receiver=(LOOPBACK, port),
        target=(LOOPBACK, dialled),
    )

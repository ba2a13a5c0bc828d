"""Real packets between hosts of one machine, each in its own network namespace, a router between.

    links = {"node-0": Link(up=..., down=...)}
    async with Tunnel(links, seed=7) as tunnel:
        command = tunnel.host("node-0").command(["ping", "-c", "3", tunnel.address("coordinator")])
        ping = await asyncio.create_subprocess_exec(*command)
        await tunnel.cut("node-0")

It needs root, /dev/net/tun and the program ``ip``, and no queueing discipline of the kernel.
"""

import asyncio
from collections.abc import Mapping
from types import TracebackType
from typing import Self

from netsim.child import ANSWER_S, START_S, AnsweringChild
from netsim.error import NetsimError
from netsim.link.link import Link
from netsim.link.shape import COORDINATOR_LINK, Shape
from netsim.namespaces import namespaces, ownership
from netsim.namespaces.host import COORDINATOR, Host, require_names
from netsim.tunnel import device
from netsim.tunnel.messages import (
    Answer,
    Cut,
    Done,
    Heal,
    Plan,
    Port,
    ReadStatistics,
    SetShape,
    Statistics,
)
from netsim.tunnel.requirements import require_controls, require_machine


def shaped(link: Link | Shape) -> Shape:
    """Return a link that nothing changes as a shape."""
    return link if isinstance(link, Shape) else Shape(link=link)


class Tunnel:
    """Hosts and the bad internet between them, for as long as the context is open.

    Args:
        links: Each node's way to the middle, fixed or changing by itself.
        coordinator: The coordinator's own way to the middle.
        seed: The same seed decides the same about the n-th packet of a direction.
        answer_s: How long the router's answer to a request may take.
    """

    def __init__(
        self,
        links: Mapping[str, Link | Shape],
        coordinator: Link | Shape = COORDINATOR_LINK,
        *,
        seed: int = 0,
        answer_s: float = ANSWER_S,
    ) -> None:
        require_names(links)
        self._shapes = {
            name: shaped(link) for name, link in {COORDINATOR: coordinator, **links}.items()
        }
        self._seed = seed
        self._hosts: dict[str, Host] = {}
        self._claim: ownership.Claim | None = None
        self._router = AnsweringChild(
            "netsim.tunnel.router", "the tunnel's router", answers=Answer, answer_s=answer_s
        )

    async def __aenter__(self) -> Self:
        require_machine()
        require_controls(shape.link.congestion_control for shape in self._shapes.values())
        making = asyncio.create_task(asyncio.to_thread(self._make))
        try:
            try:
                await asyncio.shield(making)
            finally:
                # Who is cancelled here waits: what the thread makes later nobody would remove.
                await asyncio.wait([making])
            await self._start_router()
        except BaseException:
            await self._remove()
            raise
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._remove()

    def host(self, name: str) -> Host:
        """Return a node, or ``coordinator``."""
        if name not in self._hosts:
            known = ", ".join(self._hosts)
            raise NetsimError(f"the tunnel has no host {name!r}", f"name one of {known}")
        return self._hosts[name]

    def address(self, name: str) -> str:
        """Return the address under which all the others reach a host."""
        return self.host(name).address

    @property
    def router_pid(self) -> int:
        """The process that is the internet."""
        pid = self._router.process_id
        if pid is None:
            raise NetsimError("the tunnel is not open", "use it inside `async with Tunnel(...)`")
        return pid

    async def set(self, name: str, link: Link | Shape) -> int:
        """Change a link while packets are under way. The hosts keep their congestion control.

        Returns:
            When it changed, in nanoseconds of the monotonic clock; traces count from there.
        """
        answer = await self._router.ask(SetShape(name, shaped(link)))
        assert isinstance(answer, Done)  # noqa: S101 - the only answer to this request
        return answer.at_ns

    async def cut(self, name: str) -> None:
        """Let every packet from and to a host vanish."""
        await self._router.ask(Cut(name))

    async def heal(self, name: str) -> None:
        """Undo a cut."""
        await self._router.ask(Heal(name))

    async def statistics(self) -> Statistics:
        """Return what the router counted, and how late it was: ``lateness.is_valid`` decides."""
        answer = await self._router.ask(ReadStatistics())
        assert isinstance(answer, Statistics)  # noqa: S101 - the only answer to this request
        return answer

    def _make(self) -> None:
        ownership.clean()
        self._claim = ownership.claim()
        slot = self._claim.slot
        self._hosts = {
            name: Host(name, device.address(number), f"netsim-{slot}-{name}")
            for number, name in enumerate(self._shapes, start=1)
        }
        names = [host.namespace for host in self._hosts.values()]
        # Those that exist are not in our record, so that nothing removes them.
        namespaces.require_free(names)
        self._claim.write(names)
        namespaces.create(names)

    async def _start_router(self) -> None:
        assert self._claim is not None  # noqa: S101 - made one step before
        descriptor = self._claim.descriptor
        await self._router.start(str(descriptor), descriptors=[descriptor])
        await self._router.ask(self._plan(), timeout_s=START_S)

    def _plan(self) -> Plan:
        controls = {
            self._hosts[name].address: shape.link.congestion_control
            for name, shape in self._shapes.items()
        }
        ports = []
        for name, shape in self._shapes.items():
            host = self._hosts[name]
            own = shape.link.congestion_control
            # Both ends of a link run its congestion control: the coordinator has a route for each.
            others = {a: c for a, c in controls.items() if name == COORDINATOR and c != own}
            settings = device.Host(
                namespace=host.namespace,
                address=host.address,
                congestion_control=own,
                peers=tuple(others.items()),
            )
            ports.append(Port(name=name, host=settings, shape=shape))
        return Plan(seed=self._seed, ports=tuple(ports))

    async def _remove(self) -> None:
        """End the router, who removes everything; then remove what it could not."""
        await self._router.end()
        claim, self._claim = self._claim, None
        self._hosts = {}
        if claim is not None:
            await asyncio.to_thread(claim.remove_everything)
            claim.release()

"""Real packets between hosts of one machine, each in its own network namespace, a router between.

    links = {"node-0": Link(up=..., down=...)}
    async with Tunnel(links, seed=7) as tunnel:
        command = tunnel.host("node-0").command(["ping", "-c3", tunnel.host("coordinator").address])
        ping = await asyncio.create_subprocess_exec(*command)

It needs root, /dev/net/tun and the program ``ip``, and no queueing discipline of the kernel.
"""

from collections.abc import Mapping
from typing import Self

from netsim.emulation.child import ANSWER_S, START_S, AnsweringChild
from netsim.emulation.namespaces import COORDINATOR, NamespaceNetwork
from netsim.emulation.requests import ReadStatistics, Request, RequestDone, SetShape
from netsim.link import COORDINATOR_LINK, Link, Shape
from netsim.link.error import NetsimError
from netsim.measure.lateness import Lateness
from netsim.tunnel.device import require_controls, require_tunnel
from netsim.tunnel.messages import RouterAnswer, RouterStatistics, TunnelPlan, TunnelPort


class Tunnel(NamespaceNetwork):
    """Hosts and emulated links between them, for as long as the context is open.

    Args:
        links: Each node's path to the middle, fixed or varying.
        coordinator: The coordinator's own path to the middle.
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
        super().__init__("tunnel", links)
        self._shapes = {
            name: link if isinstance(link, Shape) else Shape(link=link)
            for name, link in {COORDINATOR: coordinator, **links}.items()
        }
        self._seed = seed
        self._router = AnsweringChild(
            "netsim.tunnel.router", "the tunnel's router", answers=RouterAnswer, answer_s=answer_s
        )

    @property
    def router_pid(self) -> int:
        """Process id of the router."""
        pid = self._router.process_id
        if pid is None:
            raise NetsimError("the tunnel is not open", "use it inside `async with Tunnel(...)`")
        return pid

    async def obey(self, request: Request) -> object:
        """Pass a request to the router. The hosts keep their congestion control."""
        return await self._router.ask(request)

    async def set_link(self, name: str, link: Link | Shape) -> int:
        """Change a link while packets are under way.

        Returns:
            When it changed, in nanoseconds of the monotonic clock; traces count from there.
        """
        shape = link if isinstance(link, Shape) else Shape(link=link)
        answer = await self._router.ask(SetShape(name, shape))
        assert isinstance(answer, RequestDone)  # noqa: S101 - the only answer to this request
        return answer.at_ns

    async def statistics(self) -> RouterStatistics:
        """Return the router's counters, and how late it was: ``lateness.is_valid`` decides."""
        answer = await self._router.ask(ReadStatistics())
        assert isinstance(answer, RouterStatistics)  # noqa: S101 - the only answer to this request
        return answer

    async def lateness(self) -> Lateness:
        """Return how late the router was so far."""
        return (await self.statistics()).lateness

    def _make(self) -> None:
        self._claim_namespaces((), (name for name in self._shapes if name != COORDINATOR))

    async def __aenter__(self) -> Self:
        require_tunnel()
        require_controls(shape.link.congestion_control for shape in self._shapes.values())
        await super().__aenter__()
        try:
            assert self._claim is not None  # noqa: S101 - made one step before
            descriptor = self._claim.descriptor
            await self._router.start(str(descriptor), descriptors=[descriptor])
            await self._router.ask(self._plan(), timeout_s=START_S)
        except BaseException:
            await self._remove()
            raise
        return self

    async def _remove(self) -> None:
        # The router removes everything when its input ends; what it could not is removed after it.
        await self._router.end()
        await super()._remove()

    def _plan(self) -> TunnelPlan:
        controls = {
            self.hosts[name].address: shape.link.congestion_control
            for name, shape in self._shapes.items()
        }
        ports = []
        for name, shape in self._shapes.items():
            own = shape.link.congestion_control
            # Both ends of a link run its congestion control: the coordinator has a route for each.
            others = {a: c for a, c in controls.items() if name == COORDINATOR and c != own}
            port = TunnelPort(
                name=name,
                namespace=self.hosts[name].namespace,
                address=self.hosts[name].address,
                shape=shape,
                peers=tuple(others.items()),
            )
            ports.append(port)
        return TunnelPlan(seed=self._seed, ports=tuple(ports))

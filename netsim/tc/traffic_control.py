"""Real packets through the kernel's own queues: the network for machines whose kernel has netem.

    async with TrafficControl({"node-0": Link(up=..., down=...)}) as network:
        command = network.host("node-0").command(["curl", network.address("coordinator")])

It takes the same links as the tunnel and keeps the same records of what it made, so that either
removes what the other left behind.
"""

import asyncio
import subprocess
import sys
from collections.abc import Mapping
from types import TracebackType
from typing import Self

import msgspec
from pyroute2.netlink.exceptions import NetlinkError

from netsim.error import NetsimError
from netsim.link.link import Link
from netsim.link.shape import COORDINATOR_LINK
from netsim.namespaces import namespaces, ownership
from netsim.namespaces.host import COORDINATOR, Host, require_names
from netsim.tc import kernel
from netsim.tc.capabilities import capabilities, require_root
from netsim.tc.choice import Fallback, choose
from netsim.tc.plan import MOST_HOSTS, Plan, Port, needs, plan, remarks
from netsim.tc.queues import queues


class TrafficControl:
    """Hosts and the links between them, for as long as the context is open.

    Args:
        links: Each node's way to the middle.
        coordinator: The coordinator's own way to the middle.
    """

    def __init__(self, links: Mapping[str, Link], coordinator: Link = COORDINATOR_LINK) -> None:
        require_names(links)
        _require_few(links)
        self._links = {COORDINATOR: coordinator, **links}
        self._ports: dict[str, Port] = {}
        self._plan: Plan | None = None
        self._claim: ownership.Claim | None = None
        self._guard: subprocess.Popen[bytes] | None = None

    async def __aenter__(self) -> Self:
        making = asyncio.create_task(asyncio.to_thread(self._make))
        try:
            try:
                await asyncio.shield(making)
            finally:
                # Who is cancelled here waits: what the thread makes later nobody would remove.
                await asyncio.wait([making])
        except BaseException:
            await asyncio.to_thread(self._remove)
            raise
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await asyncio.to_thread(self._remove)

    @property
    def remarks(self) -> tuple[str, ...]:
        """How the kernel's queues differ from what was asked."""
        return tuple(remarks(self._links))

    def host(self, name: str) -> Host:
        """Return a node, or ``coordinator``."""
        port = self._port(name)
        return Host(name, port.address, port.namespace)

    def address(self, name: str) -> str:
        """Return the address under which all the others reach a host."""
        return self._port(name).address

    async def set(self, name: str, link: Link) -> None:
        """Change a link while packets are under way. The hosts keep their congestion control."""
        before = self._port(name)
        await asyncio.to_thread(require_kernel, {name: link})
        after = msgspec.structs.replace(before, up=queues(link.up), down=queues(link.down))
        await asyncio.to_thread(kernel.change, self._made(), before, after)
        self._ports[name] = after

    async def cut(self, name: str) -> None:
        """Let every packet from and to a host vanish."""
        await asyncio.to_thread(kernel.cut, self._made(), self._port(name))

    async def heal(self, name: str) -> None:
        """Undo a cut."""
        await asyncio.to_thread(kernel.heal, self._made(), self._port(name))

    def _make(self) -> None:
        require_kernel(self._links)
        self._claim = ownership.claim()
        links = {name: link for name, link in self._links.items() if name != COORDINATOR}
        prefix = f"netsim-{self._claim.slot}"
        self._plan = plan(links, self._links[COORDINATOR], prefix=prefix)
        namespaces.require_free(self._plan.namespaces)
        self._claim.write(self._plan.namespaces)
        self._guard = _guard(self._claim)
        namespaces.create(self._plan.namespaces)
        try:
            kernel.make(self._plan)
        except NetlinkError as error:
            raise NetsimError(
                f"the kernel refused a part of the network: {error.args[-1]}",
                "run `hypergpu netsim check` to see what this kernel can do, or use the tunnel",
            ) from error
        self._ports = {port.name: port for port in self._plan.ports}

    def _made(self) -> Plan:
        if self._plan is None:
            fix = "use it inside `async with TrafficControl(...)`"
            raise NetsimError("the network is not open", fix)
        return self._plan

    def _port(self, name: str) -> Port:
        self._made()
        if name not in self._ports:
            fix = f"name one of {', '.join(self._ports)}"
            raise NetsimError(f"the network has no host {name!r}", fix)
        return self._ports[name]

    def _remove(self) -> None:
        claim, self._claim = self._claim, None
        self._plan = None
        self._ports = {}
        guard, self._guard = self._guard, None
        if claim is not None:
            claim.remove_everything()
            if guard is not None:
                guard.communicate()
            claim.release()


def _guard(claim: ownership.Claim) -> "subprocess.Popen[bytes]":
    return subprocess.Popen(
        [sys.executable, "-m", "netsim.tc.guard", str(claim.descriptor)],
        stdin=subprocess.PIPE,
        pass_fds=[claim.descriptor],
        # Ctrl-C is for the owner, who removes the network in order.
        start_new_session=True,
    )


def require_kernel(links: Mapping[str, Link]) -> None:
    """Refuse links that this kernel cannot make, with the part that it lacks and who needs it."""
    require_root()
    choose(needs(links), capabilities().lacks, Fallback.REFUSE)


def _require_few(links: Mapping[str, Link]) -> None:
    if len(links) >= MOST_HOSTS:
        raise NetsimError(f"{len(links)} nodes are more than addresses", f"ask for {MOST_HOSTS}")

"""Real packets through the kernel's own queues, and what this kernel has of them.

    async with TrafficControl({"node-0": Link(up=..., down=...)}) as network:
        command = network.host("node-0").command(["curl", network.host("coordinator").address])

It takes the same links as the tunnel and keeps the same records of what it made, so that either
removes what the other left behind. The parts of the kernel are found by trying each in a namespace
of our own: the program ``tc`` may be there while the kernel knows none of its queues.
"""

import asyncio
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping

from netsim.emulation.namespaces import (
    COORDINATOR,
    NamespaceNetwork,
    claim_slot,
    inside_namespace,
    require_namespaces,
    run_batch,
    write_settings,
)
from netsim.emulation.requests import (
    Condition,
    LinkRequest,
    RequestDone,
    SetCondition,
    SetShape,
    require_no_nat,
)
from netsim.link import COORDINATOR_LINK, CongestionControl, Link, NetsimError, Shape
from netsim.measure.probe import BackendClaim
from netsim.tc.plan import (
    BRIDGE,
    HOSTS_MAX,
    CommandStep,
    KernelPart,
    QueuePort,
    change_steps,
    needs,
    redirect_lines,
    steps,
)

_VETH, _IFB = "veth0", "ifb0"
_ROUTE = "192.0.2.0/24"  # RFC 5737: documentation, on no real network
_NETEM_CLAIMS = frozenset(
    {
        BackendClaim.DELAY,
        BackendClaim.LOSS,
        BackendClaim.REORDERING,
        BackendClaim.DUPLICATION,
        BackendClaim.CONGESTION,
    }
)
"""Jitter is not among them: netem forgets it from packet to packet."""


def kernel_lacks() -> tuple[KernelPart, ...]:
    """Try every part, and return those that failed. Needs root; leaves nothing behind.

    Raises:
        NetsimError: Not even a namespace can be made.
    """
    require_namespaces("tc")
    claim = claim_slot()
    scratch = f"netsim-{claim.slot}.scratch"
    try:
        claim.make([scratch])
        # Each later part uses what the earlier ones left, and fails with its own reason without it.
        return tuple(lack for part, steps in _attempts(scratch) for lack in _try(part, steps))
    finally:
        claim.remove_everything()
        claim.release()


def claims() -> frozenset[BackendClaim]:
    """Return what the queues of this kernel emulate faithfully."""
    missing_parts = {lack.part for lack in kernel_lacks()}
    if missing_parts & {"bridge", "veth"}:
        return frozenset()
    rate = frozenset() if missing_parts & {"tbf", "ingress"} else frozenset({BackendClaim.RATE})
    return rate if "netem" in missing_parts else rate | _NETEM_CLAIMS


def _attempts(scratch: str) -> Iterator[tuple[str, list[CommandStep]]]:
    ip, tc = ("ip", "-n", scratch), ("tc", "-n", scratch)
    root = f"qdisc add dev {_VETH} root"
    yield "bridge", [(ip, [f"link add {BRIDGE} type bridge"])]
    yield "veth", [(ip, [f"link add {_VETH} type veth peer name veth1"])]
    for part, words in (("netem", "delay 1ms"), ("tbf", "rate 1mbit burst 4000 limit 10000")):
        yield part, [(tc, [f"{root} {part} {words}", f"qdisc delete dev {_VETH} root"])]
    redirect = redirect_lines(_VETH, _IFB)
    yield "ingress", [(ip, [f"link add {_IFB} type ifb"]), (tc, redirect)]
    for control in CongestionControl:
        route = f"route replace {_ROUTE} dev lo congctl {control}"
        yield control.value, [(ip, ["link set lo up", route])]


def _try(part: str, steps: list[CommandStep]) -> Iterator[KernelPart]:
    try:
        for program, lines in steps:
            run_batch(program, lines)
    except NetsimError as error:
        yield KernelPart(part, error.detail.partition(" (from ")[0])


_PORT_STATES = {Condition.CUT: 0, Condition.OPEN: 3}
"""A bridge's numbers for a port that drops everything and for one that forwards."""


class TrafficControl(NamespaceNetwork):
    """Hosts and the links between them, for as long as the context is open.

    Args:
        links: Each node's path to the middle. None of them varies by itself.
        coordinator: The coordinator's own path to the middle.
    """

    def __init__(
        self, links: Mapping[str, Link | Shape], coordinator: Link | Shape = COORDINATOR_LINK
    ) -> None:
        super().__init__("tc network", links)
        if len(links) >= HOSTS_MAX:
            raise NetsimError(f"{len(links)} nodes are more than addresses", f"give {HOSTS_MAX}")
        self._links = {
            name: _steady(name, link) for name, link in {COORDINATOR: coordinator, **links}.items()
        }
        self._ports: dict[str, QueuePort] = {}
        self._router = ""
        self._guard: subprocess.Popen[bytes] | None = None

    async def obey(self, request: LinkRequest) -> object:
        """Change a port's queues, or let the bridge drop everything from and to it."""
        if isinstance(request, SetShape):
            link = _steady(request.name, request.shape)
            await asyncio.to_thread(self._set_link, request.name, link)
        elif isinstance(request, SetCondition) and request.condition in _PORT_STATES:
            self.host(request.name)
            state = _PORT_STATES[request.condition]
            line = f"link set dev {self._ports[request.name].outside} state {state}"
            await asyncio.to_thread(run_batch, ("bridge", "-n", self._router), [line])
        else:
            what = "the kernel carries packets and knows no connection of a node"
            raise NetsimError(what, "cut the link for a moment, or use the proxy backend")
        return RequestDone()

    async def lateness(self) -> None:
        """Return None: the kernel keeps its times."""

    def _set_link(self, name: str, link: Link) -> None:
        self.host(name)
        _require_kernel({name: link})
        before = self._ports[name]
        after = before._replace(link=link)
        _run(change_steps(self._router, before, after))
        self._ports[name] = after

    def _make(self) -> None:
        _require_kernel(self._links)
        claim = self._claim_namespaces(
            ("router",), (name for name in self._links if name != COORDINATOR)
        )
        self._guard = subprocess.Popen(
            [sys.executable, "-m", "netsim.tc.guard", str(claim.descriptor)],
            stdin=subprocess.PIPE,
            pass_fds=[claim.descriptor],
            # Ctrl-C is for the owner, who removes the network in order.
            start_new_session=True,
        )
        self._router = f"netsim-{claim.slot}.router"
        self._ports = {
            name: QueuePort(self.hosts[name], link, number)
            for number, (name, link) in enumerate(self._links.items(), start=1)
        }
        for namespace in (self._router, *(host.namespace for host in self.hosts.values())):
            with inside_namespace(namespace):
                write_settings()
        _run(steps(self._router, tuple(self._ports.values())))

    async def _remove(self) -> None:
        await super()._remove()
        guard, self._guard = self._guard, None
        if guard is not None:
            await asyncio.to_thread(guard.communicate)


def _run(planned: Iterable[CommandStep]) -> None:
    for program, lines in planned:
        run_batch(program, lines)


def _steady(name: str, link: Link | Shape) -> Link:
    """Return a link that does not vary by itself."""
    if isinstance(link, Link):
        return link
    require_no_nat(name, link, "tc")
    if link.varies:
        what = f"the link of {name} varies by itself, which tc does not do"
        raise NetsimError(what, "use the tunnel or the proxy, or a profile that stays as it is")
    return link.link


def _require_kernel(links: Mapping[str, Link]) -> None:
    """Reject links that this kernel cannot make, with the part that it lacks and who needs it."""
    require_namespaces("tc")
    if reason := missing_part(needs(links), kernel_lacks()):
        raise NetsimError(reason, "use --fallback tunnel, or another kernel")


def missing_part(needed: Iterable[KernelPart], lacks: Iterable[KernelPart]) -> str:
    """Say which needed part the kernel lacks; empty when it has them all."""
    why = dict(lacks)
    missing_parts = [need for need in needed if need.part in why]
    if not missing_parts:
        return ""
    first = missing_parts[0]
    more = f" (and {len(missing_parts) - 1} more)" if len(missing_parts) > 1 else ""
    return f"{first.why}{more}, and this kernel lacks {first.part}: {why[first.part]}"

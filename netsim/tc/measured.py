"""A network of the kernel's queues, to be measured like every other."""

from collections.abc import Iterable

from netsim.link.shape import Way
from netsim.measure.network import ALWAYS_VALID, Claim, ProgramNetwork, Verdict
from netsim.measure.path import MeasuredPath
from netsim.namespaces.host import COORDINATOR
from netsim.tc.choice import Lack
from netsim.tc.traffic_control import TrafficControl

EVERYWHERE = "0.0.0.0"  # noqa: S104 - of a network namespace that only the bridge reaches
PORT = 5001
# Jitter is not among them: netem forgets it from packet to packet.
OF_NETEM = frozenset(
    {Claim.DELAY, Claim.LOSS, Claim.REORDERING, Claim.DUPLICATION, Claim.CONGESTION}
)


def claims(lacks: Iterable[Lack]) -> frozenset[Claim]:
    """What the queues do faithfully on a kernel that lacks this."""
    missing = {lack.part for lack in lacks}
    if missing & {"bridge", "veth"}:
        return frozenset()
    rate = frozenset() if missing & {"tbf", "ingress"} else frozenset({Claim.RATE})
    return rate if "netem" in missing else rate | OF_NETEM


def network(control: TrafficControl, node: str) -> ProgramNetwork:
    """Return the link of a node. The kernel keeps its times; nothing here could be late."""

    async def verdict() -> Verdict:
        return ALWAYS_VALID

    ways: dict[Way, MeasuredPath] = {
        "up": _path(control, node, COORDINATOR),
        "down": _path(control, COORDINATOR, node),
    }
    return ProgramNetwork(ways, verdict)


def _path(control: TrafficControl, sender: str, receiver: str) -> MeasuredPath:
    return MeasuredPath(
        at_sender=control.host(sender).command,
        at_receiver=control.host(receiver).command,
        receiver=(EVERYWHERE, PORT),
        target=(control.address(receiver), PORT),
    )

"""A network of the kernel's queues, to be measured like every other."""

from netsim.measure.network import ALWAYS_VALID, ProgramNetwork, Verdict, Way
from netsim.measure.path import MeasuredPath
from netsim.tc.plan import COORDINATOR
from netsim.tc.traffic_control import TrafficControl

EVERYWHERE = "0.0.0.0"  # noqa: S104 - of a network namespace that only the bridge reaches
PORT = 5001


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

"""A tunnel as a network that can be measured like every other."""

from netsim.link.shape import Way
from netsim.measure.lateness import Lateness
from netsim.measure.network import ProgramNetwork, Verdict
from netsim.measure.path import MeasuredPath
from netsim.namespaces.host import COORDINATOR
from netsim.tunnel.tunnel import Tunnel

EVERYWHERE = "0.0.0.0"  # noqa: S104 - of a network namespace that only the router reaches
PORT = 5001


def network(tunnel: Tunnel, node: str) -> ProgramNetwork:
    """Return the link of a node; its verdicts are about the whole router."""
    judged = Lateness()

    async def verdict() -> Verdict:
        nonlocal judged
        lateness = (await tunnel.statistics()).lateness
        added, judged = lateness.since(judged), lateness
        return Verdict(is_valid=added.is_valid, sentence=added.verdict())

    ways: dict[Way, MeasuredPath] = {
        "up": _path(tunnel, node, COORDINATOR),
        "down": _path(tunnel, COORDINATOR, node),
    }
    return ProgramNetwork(ways, verdict)


def _path(tunnel: Tunnel, sender: str, receiver: str) -> MeasuredPath:
    return MeasuredPath(
        at_sender=tunnel.host(sender).command,
        at_receiver=tunnel.host(receiver).command,
        receiver=(EVERYWHERE, PORT),
        target=(tunnel.address(receiver), PORT),
    )

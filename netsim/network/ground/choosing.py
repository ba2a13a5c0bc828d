"""Which backend links get when the kernel's own queues were asked for and may not do."""

from collections.abc import Iterator
from typing import NamedTuple

from netsim.error import NetsimError
from netsim.link.course import Variation
from netsim.namespaces.host import COORDINATOR
from netsim.network.ground.backend import Backend
from netsim.network.ground.interface import Links
from netsim.tc.choice import Fallback, Lack, Network, choose
from netsim.tc.plan import Need, needs

CHANGE = Lack(part="queues that change by themselves", why="the tunnel and the proxy have them")


class Chosen(NamedTuple):
    """A backend, and why it is another one than was asked for."""

    backend: Backend
    reason: str = ""


def chosen(backend: Backend, links: Links, fallback: Fallback) -> Chosen:
    """Keep to what was asked, or fall back to the tunnel where that was asked too.

    Raises:
        NetsimError: The kernel lacks what the links need and no fallback was asked for, or a
            fallback was asked for a backend that has none.
    """
    if backend is not Backend.TC:
        if fallback is not Fallback.REFUSE:
            what = f"the backend {backend} has no fallback"
            raise NetsimError(what, f"leave out --fallback, or ask for --backend {Backend.TC}")
        return Chosen(backend)
    from netsim.tc.capabilities import capabilities

    choice = choose(_needs(links), [*capabilities().lacks, CHANGE], fallback)
    if choice.network is Network.TUNNEL:
        return Chosen(Backend.TUNNEL, choice.reason)
    return Chosen(backend)


def _needs(links: Links) -> Iterator[Need]:
    shapes = {COORDINATOR: links.coordinator, **links.nodes}
    for name, shape in shapes.items():
        if shape.traces or shape.variation != Variation():
            yield Need(part=CHANGE.part, why=f"the link of {name} changes by itself")
    yield from needs({name: shape.link for name, shape in shapes.items()})

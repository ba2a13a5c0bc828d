"""What every backend offers while its links are open."""

from collections.abc import Mapping
from typing import Protocol

import msgspec

from hypergpu.sites import Sites
from netsim.link.link import Link
from netsim.link.shape import Shape
from netsim.measure.network import Verdict


class Links(msgspec.Struct, frozen=True, kw_only=True):
    """What a backend is asked for: each node's link and the coordinator's own."""

    nodes: Mapping[str, Shape]
    coordinator: Shape
    seed: int = 0
    ports: int = 2
    """How many ports of the coordinator nodes dial."""


class Ground(Protocol):
    """Open links. Names are those of the nodes."""

    @property
    def sites(self) -> Sites:
        """Where programs run and whom they dial."""

    async def set(self, name: str, link: Link) -> None:
        """Give a node another link, which varies no more."""

    async def cut(self, name: str) -> None:
        """Lose everything from and to a node, and tell nobody."""

    async def heal(self, name: str) -> None:
        """Undo a cut."""

    async def reset(self, name: str) -> None:
        """Break off a node's connections, both ends told.

        Raises:
            NetsimError: This backend carries packets and knows no connections.
        """

    async def verdict(self) -> Verdict:
        """Whether the links were as asked, as far as the backend can tell."""

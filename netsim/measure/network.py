"""What can be measured of a network between one node and the coordinator, whoever runs it.

A backend gives one of these, and is then checked like all the others: by ``netsim check``, by the
conformance suite and by the fidelity benchmark. One that runs real programs gets it from
``ProgramNetwork``; one in virtual time answers from its own clock.
"""

from collections.abc import Awaitable, Callable
from enum import StrEnum
from typing import Literal, Protocol

import msgspec

from hypergpu.units import Microseconds
from netsim.link.shape import Way
from netsim.measure import path
from netsim.measure.path import MeasuredPath
from netsim.measure.programs import Bins, Trips
from netsim.measure.statistics import Arrivals

Transport = Literal["udp", "tcp"]


class Claim(StrEnum):
    """What a backend says it does faithfully. It is held to each claim, and to nothing else."""

    DELAY = "delay"
    JITTER = "jitter"
    LOSS = "loss"
    """Drops datagrams, in bursts."""
    RATE = "rate"
    TRACE = "trace"
    REORDERING = "reordering"
    DUPLICATION = "duplication"
    CONGESTION = "congestion"
    """The hosts' real congestion control meets the loss."""


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """Whether a backend itself believes what was measured."""

    is_valid: bool
    sentence: str


ALWAYS_VALID = Verdict(is_valid=True, sentence="VALID: this backend cannot be late")


class Network(Protocol):
    """A link from a node up to the coordinator and down again, open for measuring."""

    async def probes(
        self, way: Way, *, count: int, gap_us: Microseconds, payload_bytes: int = 64
    ) -> Arrivals:
        """Send numbered datagrams at an even pace."""

    async def flood(self, way: Way, *, bits_per_s: int, for_s: float) -> Arrivals:
        """Offer a rate of full packets."""

    async def round_trips(self, transport: Transport, *, count: int, gap_us: Microseconds) -> Trips:
        """Let the coordinator echo small probes of the node."""

    async def stream(self, way: Way, *, for_s: float, congestion_control: str = "") -> Bins:
        """Fill one TCP connection."""

    async def verdict(self) -> Verdict:
        """Judge everything since the last verdict."""


class ProgramNetwork:
    """A network whose ends can run programs.

    Args:
        ways: The path up and the path down.
        verdict: What the backend says of itself.
    """

    def __init__(
        self, ways: dict[Way, MeasuredPath], verdict: Callable[[], Awaitable[Verdict]]
    ) -> None:
        self._ways = ways
        self._verdict = verdict

    async def probes(
        self, way: Way, *, count: int, gap_us: Microseconds, payload_bytes: int = 64
    ) -> Arrivals:
        """See ``Network``."""
        return await path.arrivals(
            self._ways[way], count=count, gap_us=gap_us, payload_bytes=payload_bytes
        )

    async def flood(self, way: Way, *, bits_per_s: int, for_s: float) -> Arrivals:
        """See ``Network``."""
        return await path.flood(self._ways[way], bits_per_s=bits_per_s, for_s=for_s)

    async def round_trips(self, transport: Transport, *, count: int, gap_us: Microseconds) -> Trips:
        """See ``Network``."""
        return await path.round_trips(self._ways["up"], transport, count=count, gap_us=gap_us)

    async def stream(self, way: Way, *, for_s: float, congestion_control: str = "") -> Bins:
        """See ``Network``."""
        return await path.stream(
            self._ways[way], for_s=for_s, congestion_control=congestion_control
        )

    async def verdict(self) -> Verdict:
        """See ``Network``."""
        return await self._verdict()

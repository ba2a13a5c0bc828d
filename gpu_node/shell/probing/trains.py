"""Trains of datagrams: sent, counted, and told apart from a port that lets nothing through.

A train that lost everything is kept back until the next: either something comes through again, and
it was an outage that counts, or three in a row are gone while the control stream lives, and then
datagrams are blocked here, which says nothing of the line.
"""

import asyncio
from collections.abc import Set
from typing import Any, NamedTuple

from hypergpu.v1.node_pb2 import ProbeTrain
from hypergpu.wire.probing import Numbers, datagram, numbers_of

PACKETS = 20
BLOCKED_AFTER = 3
"""Trains in a row of which nothing came back."""
_SPACING_S = 0.005
"""Time between two packets: a train takes a tenth of a second, as long as a burst of losses may."""


class ProbeTarget(NamedTuple):
    """Address that trains are sent to, and the token that it answers to."""

    host: str
    port: int
    token: bytes


async def send_train(target: ProbeTarget, number: int, *, wait_s: float) -> ProbeTrain:
    """Send a train and count the packets back ``wait_s`` after its last one.

    Each train has a socket of its own: late packets of one are not taken for another's. ICMP errors
    change nothing: those packets are lost, and the others may still be on their way.
    """
    loop = asyncio.get_running_loop()
    receiver = _EchoReceiver(target.token, number)
    try:
        transport, _ = await loop.create_datagram_endpoint(
            lambda: receiver, remote_addr=(target.host, target.port)
        )
    except OSError:
        return ProbeTrain(sent=PACKETS, lost=PACKETS, bursts=1)
    try:
        for packet in range(PACKETS):
            transport.sendto(datagram(target.token, Numbers(number, packet)))
            await asyncio.sleep(_SPACING_S)
        async with asyncio.timeout(wait_s):
            await receiver.is_complete.wait()
    except TimeoutError:
        pass
    finally:
        transport.close()
    return count_missing(PACKETS, receiver.arrived)


class _EchoReceiver(asyncio.DatagramProtocol):
    """Collects echoes and ignores errors: one packet's says nothing of the others."""

    def __init__(self, token: bytes, train: int) -> None:
        self._token = token
        self._train = train
        self.arrived: set[int] = set()
        self.is_complete = asyncio.Event()
        """Every packet is back."""

    def datagram_received(self, payload: bytes, addr: Any) -> None:
        numbers = numbers_of(payload, self._token)
        if numbers is None or numbers.train != self._train or numbers.packet >= PACKETS:
            return
        self.arrived.add(numbers.packet)
        if len(self.arrived) == PACKETS:
            self.is_complete.set()


def count_missing(sent: int, arrived: Set[int]) -> ProbeTrain:
    """The number of missing packets of ``0 .. sent - 1``, and of the runs that they form."""
    missing = [packet not in arrived for packet in range(sent)]
    begins = [is_missing and not (at and missing[at - 1]) for at, is_missing in enumerate(missing)]
    return ProbeTrain(sent=sent, lost=sum(missing), bursts=sum(begins))


class BlockedJudgment(NamedTuple):
    """Whether datagrams are blocked, as far as trains show."""

    is_blocked: bool = False
    unjudged: tuple[ProbeTrain, ...] = ()
    """Trains that lost everything and may be an outage or a blocked port."""


def judge_train(
    before: BlockedJudgment, train: ProbeTrain
) -> tuple[BlockedJudgment, tuple[ProbeTrain, ...]]:
    """The judgment after another train, and the trains that now count."""
    if train.lost < train.sent:
        return BlockedJudgment(), (*before.unjudged, train)
    if before.is_blocked or len(before.unjudged) + 1 >= BLOCKED_AFTER:
        return BlockedJudgment(is_blocked=True), ()
    return BlockedJudgment(unjudged=(*before.unjudged, train)), ()

"""Sends one train of datagrams and listens for what of it comes back."""

import asyncio
from typing import Any, NamedTuple

from gpu_node.shell.probe.findings import TrainCount
from gpu_node.shell.probe.train import count_missing
from hypergpu.wire.probing import Numbers, datagram, numbers_of

PACKETS = 20
_SPACING_S = 0.005
"""Between two packets: a train takes a tenth of a second, as long as a burst of losses may."""


class Target(NamedTuple):
    """Where trains go, and what opens the door there."""

    host: str
    port: int
    token: bytes


async def sent_train(target: Target, number: int, *, wait_s: float) -> TrainCount:
    """Send a train and count what is back ``wait_s`` after its last packet.

    A socket of its own for each: what comes late for one is not taken for another's. What is said
    of packets that got nowhere (ICMP) changes nothing: those are lost, and the others may still be
    on their way.
    """
    loop = asyncio.get_running_loop()
    ear = _Ear(target.token, number)
    try:
        transport, _ = await loop.create_datagram_endpoint(
            lambda: ear, remote_addr=(target.host, target.port)
        )
    except OSError:
        return TrainCount(PACKETS, PACKETS, 1)
    try:
        for packet in range(PACKETS):
            transport.sendto(datagram(target.token, Numbers(number, packet)))
            await asyncio.sleep(_SPACING_S)
        async with asyncio.timeout(wait_s):
            await ear.is_complete.wait()
    except TimeoutError:
        pass
    finally:
        transport.close()
    return count_missing(PACKETS, ear.arrived)


class _Ear(asyncio.DatagramProtocol):
    """Hears echoes, and is deaf to errors: one packet's says nothing of the others."""

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

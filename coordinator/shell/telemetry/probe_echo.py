"""The UDP port that sends probe datagrams back: as they came, to where they came from.

What has no good token of a connected node, has another size or comes too fast is dropped without a
word and counted. A token is not bound to an address: whoever bears it is answered, or whomever he
gives as the sender. So a stolen one has datagrams reflected, but no larger ones than were sent, and
with all tokens of one node no more than `RATE`.
"""

import asyncio
from collections.abc import Callable
from typing import Any, NamedTuple

import structlog

from coordinator.shell.clock import monotonic_ms
from coordinator.shell.identity.rate import Bucket, Rate, take_token
from coordinator.shell.telemetry.probe_tokens import ProbeTokens
from hypergpu.ids import NodeId
from hypergpu.units import Milliseconds
from hypergpu.wire.probing import DATAGRAM_BYTES, TOKEN_BYTES

log = structlog.get_logger()

RATE = Rate(burst=60, interval_ms=Milliseconds(100))
"""Of one node: three trains at once, then ten packets a second, five times what it may need."""
Peer = tuple[str | Any, int]


class EchoCount(NamedTuple):
    """Datagrams so far."""

    echoed: int
    strange: int
    """Of another size, or without a good token of a node that is connected."""
    hurried: int
    """Beyond the rate."""


class ProbeEcho(asyncio.DatagramProtocol):
    """One UDP port."""

    def __init__(self, tokens: ProbeTokens, is_connected: Callable[[NodeId], bool]) -> None:
        self._tokens = tokens
        self._is_connected = is_connected
        self._buckets: dict[NodeId, Bucket] = {}
        self._transport: asyncio.DatagramTransport | None = None
        self._echoed = self._strange = self._hurried = 0
        self.port = 0
        """0 while there is none."""

    async def open(self, host: str, port: int) -> None:
        """Take a port. Without it losses are only guessed, which is no reason not to serve."""
        loop = asyncio.get_running_loop()
        try:
            transport, _ = await loop.create_datagram_endpoint(
                lambda: self, local_addr=(host.strip("[]"), port)
            )
        except OSError as broken:
            log.warning("no UDP port to measure losses by", port=port, reason=str(broken))
            return
        self._transport = transport
        self.port = int(transport.get_extra_info("sockname")[1])

    def token(self, node: NodeId) -> bytes:
        """What the node's datagrams are to begin with; empty when there is no port for them."""
        return self._tokens.token(node, monotonic_ms()) if self.port else b""

    def close(self) -> None:
        """Give the port back."""
        if self._transport is not None:
            self._transport.close()
        self.port = 0

    @property
    def count(self) -> EchoCount:
        """What was done so far."""
        return EchoCount(self._echoed, self._strange, self._hurried)

    def datagram_received(self, payload: bytes, addr: Peer) -> None:
        """Send it back or drop it."""
        now_ms = monotonic_ms()
        node = None
        if len(payload) == DATAGRAM_BYTES:
            node = self._tokens.bearer(payload[:TOKEN_BYTES], now_ms)
        if node is None or not self._is_connected(node):
            self._strange += 1
        elif not self._admits(node, now_ms):
            self._hurried += 1
        elif self._transport is not None:
            self._echoed += 1
            self._transport.sendto(payload, addr)

    def _admits(self, node: NodeId, now_ms: Milliseconds) -> bool:
        bucket = take_token(RATE, self._buckets.get(node, Bucket()), now_ms)
        if bucket is None:
            return False
        self._buckets[node] = bucket
        return True

    def forget(self, node: NodeId) -> None:
        """The node's stream ended. Its tokens are good for nothing until it is back, and its rate
        then begins afresh.
        """
        self._buckets.pop(node, None)

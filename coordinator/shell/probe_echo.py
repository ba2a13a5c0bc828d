"""The UDP port that sends probe datagrams back: as they came, to where they came from.

A datagram without a good token of a connected node, of another size, or beyond the rate is dropped
and counted. A token is not bound to an address: its bearer is answered at whatever address the
datagram names. So a stolen token has datagrams reflected, but none larger than those sent, and with
all tokens of one node no more than `RATE`.
"""

import asyncio
from collections.abc import Callable
from typing import Any, NamedTuple

import structlog

from coordinator.shell.probe_tokens import ProbeTokens
from hypergpu.clock import monotonic_ms
from hypergpu.ids import NodeId
from hypergpu.rates import Rate, RateLimiter
from hypergpu.units import Milliseconds
from hypergpu.wire.datagrams import DATAGRAM_BYTES, TOKEN_BYTES

log = structlog.get_logger()

RATE = Rate(burst=60, interval_ms=Milliseconds(100))
"""Limit per node: three trains at once, then ten packets a second, five times what it may need."""
_DatagramPeer = tuple[str | Any, int]


class EchoCount(NamedTuple):
    """Datagrams since the start, by what became of them."""

    echoed: int
    unauthorised: int
    """Datagrams of another size, or without a good token of a connected node."""
    throttled: int
    """Datagrams beyond the rate."""


class ProbeEcho(asyncio.DatagramProtocol):
    """One UDP port."""

    def __init__(
        self,
        tokens: ProbeTokens,
        is_connected: Callable[[NodeId], bool],
        *,
        clock: Callable[[], Milliseconds] = monotonic_ms,
        shares_port: bool = False,
    ) -> None:
        """``clock`` dates tokens: machines that share a secret need one that they share, too."""
        self._tokens = tokens
        self._is_connected = is_connected
        self._clock = clock
        self._shares_port = shares_port
        self._limiter = RateLimiter(RATE)
        self._transport: asyncio.DatagramTransport | None = None
        self.count = EchoCount(0, 0, 0)
        self.port = 0
        """0 while there is none."""

    async def open(self, host: str, port: int) -> None:
        """Bind a port. Without it losses are only guessed, which is no reason not to serve."""
        loop = asyncio.get_running_loop()
        try:
            transport, _ = await loop.create_datagram_endpoint(
                lambda: self,
                local_addr=(host.strip("[]"), port),
                reuse_port=self._shares_port or None,
            )
        except OSError as error:
            log.warning("no UDP port to measure losses by", port=port, reason=str(error))
            return
        self._transport = transport
        self.port = int(transport.get_extra_info("sockname")[1])

    def token(self, node: NodeId) -> bytes:
        """Token that the node's datagrams begin with; empty when there is no port for them."""
        return self._tokens.token(node, self._clock()) if self.port else b""

    def close(self) -> None:
        """Give the port back."""
        if self._transport is not None:
            self._transport.close()
        self.port = 0

    def datagram_received(self, payload: bytes, addr: _DatagramPeer) -> None:
        """Send it back or drop it."""
        now_ms = self._clock()
        node = None
        if len(payload) == DATAGRAM_BYTES:
            node = self._tokens.bearer(payload[:TOKEN_BYTES], now_ms)
        if node is None or not self._is_connected(node):
            self.count = self.count._replace(unauthorised=self.count.unauthorised + 1)
        elif not self._limiter.take(node, now_ms):
            self.count = self.count._replace(throttled=self.count.throttled + 1)
        elif self._transport is not None:
            self.count = self.count._replace(echoed=self.count.echoed + 1)
            self._transport.sendto(payload, addr)

    def forget(self, node: NodeId) -> None:
        """Drop the rate of a node whose stream ended; its tokens are void until it is back."""
        self._limiter.forget(node)

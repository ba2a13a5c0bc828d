"""The feed of one view of a coordinator: its state, the newest deltas and the clients that follow.

Every delta is encoded once, whatever the number of clients, down to the WebSocket's own frame. All
of it runs on one event loop, which serves others between a few clients and the next ones.
"""

import asyncio
import secrets
from collections.abc import Iterator
from itertools import islice

from websockets.frames import Frame, Opcode

from dashboard_api.core.changes import Change, conflated_changes
from dashboard_api.core.frames import HelloFrame, delta_frame, snapshot_frame
from dashboard_api.core.outbox import ClientQueue, DeltaRing, Pacer, Resume, Wanted
from dashboard_api.core.projection import FeedProjection
from hypergpu.clock import monotonic_ms, unix_ms
from hypergpu.errors import HyperGPUError

CLIENTS_AT_ONCE = 10
"""Clients that are woken before the loop serves others."""


def text_message(frame: bytes) -> bytes:
    """A frame of the feed as a server's WebSocket sends it: the same octets for every client."""
    return Frame(Opcode.TEXT, frame).serialize(mask=False)


class FeedClient:
    """One connection's queue."""

    def __init__(self, feed: "Feed") -> None:
        self._feed = feed
        self.queue = ClientQueue()
        self.changed = asyncio.Event()
        """Set when there may be something to send."""

    async def next_message(self) -> bytes | None:
        """Wait for the next frame, as a WebSocket message; None: the feed is refused."""
        while self._feed.refusal is None:
            self.changed.clear()
            frame = self.queue.take()
            if isinstance(frame, bytes):
                return frame
            if frame is Wanted.SNAPSHOT and (snapshot := self._feed.snapshot()) is not None:
                self.queue.note_snapshot()
                return snapshot
            await self.changed.wait()
        return None


class Feed:
    """State, ring and clients."""

    def __init__(self, projection: FeedProjection) -> None:
        self.projection = projection
        self.epoch = secrets.token_hex(8)
        self.clients: set[FeedClient] = set()
        self.ring = DeltaRing()
        self.snapshots_forced = 0
        self.refusal: HyperGPUError | None = None
        """Why the coordinator shows nothing more to the token of this feed."""
        self._clients_changed = asyncio.Event()
        self._pacer = Pacer()
        self._pending: list[Change] = projection.take_changes()
        self._timer: asyncio.TimerHandle | None = None
        self._snapshot: tuple[int, bytes] | None = None
        self._pending.clear()

    def hello(self, role: str) -> HelloFrame:
        """First frame of a connection."""
        address = str(self.projection.state["coordinator"]["address"])
        return HelloFrame(1, self.epoch, self.ring.seq, role, address)  # type: ignore[arg-type]

    def open_client(self, resume: Resume | None) -> FeedClient:
        """A client from now on."""
        client = FeedClient(self)
        missed_deltas = None
        if resume is not None and resume.epoch == self.epoch:
            missed_deltas = self.ring.after(resume.seq)
        client.queue.begin(missed_deltas)
        self.clients.add(client)
        self._note_clients()
        return client

    def close_client(self, client: FeedClient) -> None:
        """Forget a client."""
        self.snapshots_forced += client.queue.snapshots_forced
        self.clients.discard(client)
        self._note_clients()

    async def wait_for_clients(self) -> None:
        """Wait until a client comes or goes."""
        await self._clients_changed.wait()

    def _note_clients(self) -> None:
        self._clients_changed.set()
        self._clients_changed = asyncio.Event()

    def publish(self) -> None:
        """Send what changed, now or as soon as the pace allows."""
        self._pending += self.projection.take_changes()
        if self._pending and self._timer is None:
            wait_ms = self._pacer.wait_ms(monotonic_ms())
            if wait_ms:
                loop = asyncio.get_running_loop()
                self._timer = loop.call_later(wait_ms / 1000, self._send_late)
            else:
                self._send()

    def snapshot(self) -> bytes | None:
        """Message with the newest state; None: changes are about to be sent first."""
        if self._pending:
            return None
        if self._snapshot is None or self._snapshot[0] != self.ring.seq:
            frame = snapshot_frame(self.ring.seq, unix_ms(), self.projection.state)
            self._snapshot = (self.ring.seq, text_message(frame))
        return self._snapshot[1]

    def refuse(self, refusal: HyperGPUError) -> None:
        """End every client's connection: the token is good no longer."""
        self.refusal = refusal
        self._wake(iter(tuple(self.clients)))

    def close(self) -> None:
        """Stop the timer."""
        if self._timer is not None:
            self._timer.cancel()

    def _send_late(self) -> None:
        self._timer = None
        self._pending += self.projection.take_changes()
        self._send()

    def _send(self) -> None:
        changes, self._pending = conflated_changes(self._pending), []
        self._pacer.note_delta(monotonic_ms())
        message = text_message(delta_frame(self.ring.seq + 1, unix_ms(), changes))
        self.ring.add(message)
        for client in self.clients:
            client.queue.offer(message)
        self._wake(iter(tuple(self.clients)))

    def _wake(self, waiting: Iterator[FeedClient]) -> None:
        """Wake some clients, and the others after whatever else the loop has to do."""
        woken_clients = tuple(islice(waiting, CLIENTS_AT_ONCE))
        for client in woken_clients:
            client.changed.set()
        if woken_clients:
            asyncio.get_running_loop().call_soon(self._wake, waiting)

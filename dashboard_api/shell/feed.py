"""The feed of one view of a coordinator: its state, the newest deltas and the clients that follow.

Every delta is encoded once, whatever the number of clients. All of it runs on one event loop.
"""

import asyncio
import secrets
from typing import Protocol

from dashboard_api.core.changes import Change, conflated_changes
from dashboard_api.core.frames import HelloFrame, delta_frame, snapshot_frame
from dashboard_api.core.outbox import ClientQueue, DeltaRing, Pacer, Resume, Wanted
from dashboard_api.core.projection import FeedProjection
from hypergpu.streams import monotonic_ms, unix_ms


class FrameSource(Protocol):
    """Frames for clients: a live feed or a recording."""

    def hello(self, role: str) -> HelloFrame:
        """First frame of a connection."""
        ...

    def open_client(self, resume: Resume | None) -> "FeedClient":
        """A client from now on; it continues where it was if that is still known."""
        ...

    def close_client(self, client: "FeedClient") -> None:
        """Forget a client."""
        ...


class FeedClient:
    """One connection's queue."""

    def __init__(self, feed: "Feed") -> None:
        self._feed = feed
        self.queue = ClientQueue()
        self.changed = asyncio.Event()
        """Set when there may be something to send."""

    async def next_frame(self) -> bytes:
        """Wait for the next frame."""
        while True:
            self.changed.clear()
            frame = self.queue.take()
            if isinstance(frame, bytes):
                return frame
            if frame is Wanted.SNAPSHOT and (snapshot := self._feed.snapshot()) is not None:
                self.queue.note_snapshot()
                return snapshot
            await self.changed.wait()


class Feed:
    """State, ring and clients."""

    def __init__(self, projection: FeedProjection) -> None:
        self.projection = projection
        self.epoch = secrets.token_hex(8)
        self.clients: set[FeedClient] = set()
        self.ring = DeltaRing()
        self.snapshots_forced = 0
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
        missed = None
        if resume is not None and resume.epoch == self.epoch:
            missed = self.ring.after(resume.seq)
        client.queue.begin(missed)
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
        """The state of the newest sequence number; None: changes are about to be sent first."""
        if self._pending:
            return None
        if self._snapshot is None or self._snapshot[0] != self.ring.seq:
            frame = snapshot_frame(self.ring.seq, unix_ms(), self.projection.state)
            self._snapshot = (self.ring.seq, frame)
        return self._snapshot[1]

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
        frame = delta_frame(self.ring.seq + 1, unix_ms(), changes)
        self.ring.add(frame)
        for client in self.clients:
            client.queue.offer(frame)
            client.changed.set()

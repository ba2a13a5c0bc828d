"""What a client of the feed gets next. Time is an argument; frames are bytes that clients share.

A delta leaves at once after silence, and then at most twenty in a second. A client that falls
behind by more than its queue holds loses the queue and gets the whole state instead.
"""

from collections import deque
from enum import Enum

import msgspec

DELTA_GAP_MS = 50
QUEUE_BYTES = 1 << 20
RING_BYTES = 8 << 20
STALLED_AFTER_MS = 10_000


class Pacer:
    """Times of deltas: the first change after silence at once, then one in each gap."""

    def __init__(self, gap_ms: int = DELTA_GAP_MS) -> None:
        self._gap_ms = gap_ms
        self._last_ms: int | None = None

    def wait_ms(self, now_ms: int) -> int:
        """Time until a delta may leave; 0: now."""
        if self._last_ms is None:
            return 0
        return max(0, self._last_ms + self._gap_ms - now_ms)

    def note_delta(self, now_ms: int) -> None:
        """Remember that a delta left."""
        self._last_ms = now_ms


class DeltaRing:
    """The newest deltas, for clients that come back."""

    def __init__(self, bytes_max: int = RING_BYTES) -> None:
        self._frames: deque[bytes] = deque()
        self._bytes_max = bytes_max
        self._bytes = 0
        self.seq = 0
        """Sequence number of the newest delta; 0 before the first."""

    def add(self, frame: bytes) -> None:
        """Add the delta after the newest; the oldest ones go."""
        self.seq += 1
        self._frames.append(frame)
        self._bytes += len(frame)
        while self._bytes > self._bytes_max:
            self._bytes -= len(self._frames.popleft())

    def after(self, seq: int) -> list[bytes] | None:
        """Deltas after a sequence number, oldest first; None: not all of them are there."""
        missed_deltas = self.seq - seq
        if not 0 <= missed_deltas <= len(self._frames):
            return None
        return [
            self._frames[at] for at in range(len(self._frames) - missed_deltas, len(self._frames))
        ]


class Resume(msgspec.Struct, frozen=True):
    """What a client that comes back has."""

    epoch: str
    seq: int


class Wanted(Enum):
    """What a client's queue asks for when it gives no frame."""

    NOTHING = "nothing"
    SNAPSHOT = "snapshot"


class ClientQueue:
    """Frames that wait for one client."""

    def __init__(self, bytes_max: int = QUEUE_BYTES) -> None:
        self._frames: deque[bytes] = deque()
        self._bytes_max = bytes_max
        self.bytes_waiting = 0
        self.needs_snapshot = True
        self.snapshots_forced = 0
        """How often the queue overflowed."""

    def begin(self, frames: list[bytes] | None) -> None:
        """Start with the deltas that a returning client missed; None: with a snapshot."""
        self.needs_snapshot = frames is None
        for frame in frames or ():
            self.offer(frame)

    def offer(self, frame: bytes) -> None:
        """Add the newest delta. A client that waits for a snapshot gets it with that."""
        if self.needs_snapshot:
            return
        self._frames.append(frame)
        self.bytes_waiting += len(frame)
        if self.bytes_waiting > self._bytes_max:
            self._frames.clear()
            self.bytes_waiting = 0
            self.needs_snapshot = True
            self.snapshots_forced += 1

    def take(self) -> bytes | Wanted:
        """The next frame; the caller answers `Wanted.SNAPSHOT` with `note_snapshot`."""
        if self.needs_snapshot:
            return Wanted.SNAPSHOT
        if not self._frames:
            return Wanted.NOTHING
        frame = self._frames.popleft()
        self.bytes_waiting -= len(frame)
        return frame

    def note_snapshot(self) -> None:
        """The client was given the state of the newest sequence number."""
        self.needs_snapshot = False

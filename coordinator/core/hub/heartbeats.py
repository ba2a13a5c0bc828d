"""How often idle nodes say that they are there: the more streams a process holds, the less often.

A node at work is heard every few seconds whatever its heartbeats do, since it measures its line and
tells its progress. So only the silence of idle nodes is borne for longer.
"""

from typing import NamedTuple

from hypergpu.units import Milliseconds

STREAMS_AT_USUAL = 1_000
"""Streams of a process up to which heartbeats come as often as its settings say."""
INTERVAL_MS_MAX = 30_000
"""Longest interval: home routers drop idle mappings within a minute."""
WORK_MS = 20_000
"""Time after a sign of work in which a node is heard every few seconds. The node itself measures
for ten seconds more."""
_NEWS_PART = 4
"""An interval that differs by so small a part from what a node was told is not worth a message."""


class UsualPace(NamedTuple):
    """The settings of a coordinator, by default those of its own defaults."""

    interval_ms: int = 5_000
    lost_after_ms: int = 15_000
    """Silence after which a node counts as lost."""


class HeartbeatPace(NamedTuple):
    """Interval of heartbeats, and the silence that it implies."""

    interval_ms: Milliseconds
    lost_after_ms: Milliseconds
    reason: str


def heartbeat_pace(streams: int, usual: UsualPace) -> HeartbeatPace:
    """Pace of heartbeats in a process that holds so many streams of nodes itself."""
    interval_ms, longest_ms = usual.interval_ms, max(usual.interval_ms, INTERVAL_MS_MAX)
    if streams > STREAMS_AT_USUAL:
        interval_ms = min(longest_ms, interval_ms * streams // STREAMS_AT_USUAL)
    lost_after_ms = usual.lost_after_ms * interval_ms // usual.interval_ms
    reason = f"every {interval_ms / 1000:g} s: {streams} streams of {STREAMS_AT_USUAL}"
    return HeartbeatPace(Milliseconds(interval_ms), Milliseconds(lost_after_ms), reason)


class StreamPace(NamedTuple):
    """What a node was told of heartbeats, and when it last showed that it is at work."""

    told: HeartbeatPace
    usual: UsualPace
    worked_ms: Milliseconds | None = None
    """When it was last given work, or told its progress; None: never on this stream."""

    @classmethod
    def begin(cls, usual: UsualPace) -> "StreamPace":
        """The usual pace, before a node is told any."""
        return cls(heartbeat_pace(0, usual), usual)

    @property
    def is_usual(self) -> bool:
        """Whether heartbeats come as often as the settings say."""
        return self.told.interval_ms <= self.usual.interval_ms

    def is_outdated(self, streams: int) -> bool:
        """Whether the node is to be told another pace."""
        now_ms, told_ms = heartbeat_pace(streams, self.usual).interval_ms, self.told.interval_ms
        return abs(now_ms - told_ms) * _NEWS_PART >= told_ms

    def with_streams(self, streams: int) -> "StreamPace":
        """The state once the node is told the pace of so many streams."""
        return self._replace(told=heartbeat_pace(streams, self.usual))

    def after_work(self, now_ms: Milliseconds) -> "StreamPace":
        """The state after a sign of work."""
        return self._replace(worked_ms=now_ms)

    def silence_limit_ms(self, now_ms: Milliseconds) -> Milliseconds:
        """Silence after which the node counts as lost."""
        if self.worked_ms is not None and now_ms - self.worked_ms < WORK_MS:
            return Milliseconds(self.usual.lost_after_ms)
        return self.told.lost_after_ms

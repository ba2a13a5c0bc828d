"""Job time into wall-clock time.

A journal's time starts with its job and stands still while the coordinator is down. So its distance
from the wall clock grows with each restart: it is noted when it was seen to have grown.
"""

from bisect import bisect_right, insort
from collections.abc import Iterable
from statistics import median_low

import msgspec

from hypergpu.journal.events import UpdateReceivedEvent
from hypergpu.user.client.values import JobEvent

MOVED_BY_MS = 2_000
"""A greater distance than before is noted from here on; less is the delay of an answer."""


EARLIEST_UNIX_MS, LATEST_UNIX_MS = 1_577_836_800_000, 4_102_444_800_000


class Anchor(msgspec.Struct, frozen=True):
    """From a job time on: Unix time minus job time."""

    from_job_ms: int
    distance_ms: int


def journal_distance_ms(events: Iterable[JobEvent]) -> int | None:
    """Unix time minus job time, by what each node's first accepted update tells; None: none does.

    A node takes its wall clock for the nonce of an update, which is in the journal. The median of
    the nodes counts: one clock that is wrong moves nothing.
    """
    first: dict[str, int] = {}
    for event in events:
        match event.content:
            case UpdateReceivedEvent(node=node, update=update):
                if EARLIEST_UNIX_MS < update.nonce < LATEST_UNIX_MS:
                    first.setdefault(node, update.nonce - event.at_ms)
            case _:
                pass
    return median_low(first.values()) if first else None


class WallClock:
    """Anchors of one job, ascending."""

    def __init__(self, anchors: list[Anchor]) -> None:
        self._anchors = sorted(anchors, key=lambda each: each.from_job_ms)

    @property
    def has_anchor(self) -> bool:
        """Whether anything is known."""
        return bool(self._anchors)

    def note(self, job_ms: int, now_ms: int) -> Anchor | None:
        """Compare the job's time with the wall clock; returns an anchor that is new."""
        distance_ms = now_ms - job_ms
        if self._anchors and distance_ms - self._anchors[-1].distance_ms < MOVED_BY_MS:
            return None
        anchor = Anchor(job_ms if self._anchors else 0, distance_ms)
        self._anchors.append(anchor)
        return anchor

    def take(self, anchor: Anchor) -> None:
        """Take an anchor that is known from elsewhere."""
        insort(self._anchors, anchor, key=lambda each: each.from_job_ms)

    def unix_ms(self, job_ms: int) -> int:
        """Wall-clock time of a job time."""
        if not self._anchors:
            return job_ms
        at = bisect_right(self._anchors, job_ms, key=lambda each: each.from_job_ms) - 1
        return job_ms + self._anchors[max(0, at)].distance_ms

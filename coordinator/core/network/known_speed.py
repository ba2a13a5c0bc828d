"""Speeds of nodes that outlive jobs and restarts of the coordinator: times of a step, by workload,
as progress and accepted updates showed them.

A speed is a forecast that grows old: its spread grows as that of a random walk does, it counts as
few observations, and after some days it is forgotten. It holds for one device and one set of
versions. Plans are journalled, so no replay needs any of it.
"""

from math import hypot, sqrt
from typing import NamedTuple

import msgspec
from msgspec.structs import replace

from coordinator.core.network.reading import Estimate
from hypergpu.units import Milliseconds

WORKLOADS_MOST = 8
"""Speeds that are kept of a node; the one that is not used for longest makes room."""
DAYS_KEPT = 7
SPREAD_A_DAY = 0.2
"""Part of the time of a step that it may be off by after a day; after four days twice as much."""
COUNT_MOST = 3
"""A speed that is recalled counts as so many observations at most."""
_DAY_MS = 86_400_000


class SpeedSource(NamedTuple):
    """What a speed is of: two of unequal sources are not compared."""

    workload: str
    """Digest of workload, options, layout and batch."""
    device: str
    """Digest of the node's device, its limits and versions."""


class KnownSpeed(msgspec.Struct, frozen=True):
    """Time of a step of one workload on one device."""

    device: str
    step_us: Estimate
    """Its ``at_ms`` is Unix time."""


class SpeedRecord(msgspec.Struct, frozen=True):
    """All that is known of one node."""

    speeds: dict[str, KnownSpeed] = {}
    """By workload, the newest last; at most `WORKLOADS_MOST`."""

    @property
    def newest_ms(self) -> Milliseconds:
        """Unix time of the newest observation; 0: there is none."""
        return max((each.step_us.at_ms for each in self.speeds.values()), default=Milliseconds(0))


def record_speed(
    record: SpeedRecord, source: SpeedSource, step_us: Estimate, at_ms: Milliseconds
) -> SpeedRecord:
    """The record with a speed that was just observed, at a Unix time."""
    speeds = {key: each for key, each in record.speeds.items() if key != source.workload}
    kept_speeds = list(speeds.items())[-(WORKLOADS_MOST - 1) :]
    new_speed = KnownSpeed(source.device, replace(step_us, at_ms=at_ms))
    return SpeedRecord({**dict(kept_speeds), source.workload: new_speed})


def recalled_speed(record: SpeedRecord, source: SpeedSource, now_ms: Milliseconds) -> Estimate:
    """What the record says at a Unix time of a speed; no observations: nothing."""
    known_speed = record.speeds.get(source.workload)
    if known_speed is None or known_speed.device != source.device:
        return Estimate()
    days = max(0, now_ms - known_speed.step_us.at_ms) / _DAY_MS
    if days >= DAYS_KEPT:
        return Estimate()
    mean = known_speed.step_us.mean
    return replace(
        known_speed.step_us,
        deviation=hypot(known_speed.step_us.deviation, SPREAD_A_DAY * sqrt(days) * mean),
        count=min(known_speed.step_us.count, COUNT_MOST),
        drift=0.0,
    )

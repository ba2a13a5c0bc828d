"""Series at many levels of detail: each bucket keeps the least and the greatest of its points.

Level 0 holds the points. A bucket of level n covers ``FAN_OUT ** n`` points that follow each other,
so that any span is read with a bounded number of rows and no extreme is lost.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

FAN_OUT = 16
LEVELS = 6
"""Levels 0 to 5: the coarsest bucket covers a million points."""
POINTS_MAX = 4_000


class SeriesPoint(msgspec.Struct, frozen=True):
    """A value of a series."""

    name: str
    index: int
    """Position in the series, from 0: a round, or a count."""
    at_ms: int
    value: float
    moved_bytes: int = 0
    """Traffic of the job until then, both ways."""
    round: int = 0


class Bucket(msgspec.Struct, frozen=True):
    """Some points that follow each other."""

    number: int
    at_ms: int
    """Time of the first point; traffic and round are the first point's, too."""
    moved_bytes: int
    round: int
    least: float
    greatest: float
    total: float
    count: int


def bucket_number(index: int, level: int) -> int:
    """Number of the bucket of a level that covers a point."""
    covered_points: int = FAN_OUT**level
    return index // covered_points


def point_buckets(points: Iterable[SeriesPoint], level: int) -> list[Bucket]:
    """Buckets of a level that cover the points, which ascend by index."""
    return merged_buckets(
        Bucket(
            bucket_number(each.index, level),
            each.at_ms,
            each.moved_bytes,
            each.round,
            each.value,
            each.value,
            each.value,
            1,
        )
        for each in points
    )


def merged_buckets(buckets: Iterable[Bucket]) -> list[Bucket]:
    """Join neighbours of the same number; order is kept."""
    joined_buckets: list[Bucket] = []
    for each in buckets:
        if joined_buckets and joined_buckets[-1].number == each.number:
            joined_buckets[-1] = _sum_of_two(joined_buckets[-1], each)
        else:
            joined_buckets.append(each)
    return joined_buckets


def _sum_of_two(one: Bucket, other: Bucket) -> Bucket:
    return Bucket(
        one.number,
        one.at_ms,
        one.moved_bytes,
        one.round,
        min(one.least, other.least),
        max(one.greatest, other.greatest),
        one.total + other.total,
        one.count + other.count,
    )


def level_for(count: int, points: int) -> int:
    """The coarsest level that still has at least ``points`` buckets for ``count`` points."""
    level = 0
    while level + 1 < LEVELS and count // FAN_OUT ** (level + 1) >= points:
        level += 1
    return level


def reduce_buckets(buckets: Sequence[Bucket], points: int) -> list[Bucket]:
    """At most ``points`` buckets with every extreme of the given ones."""
    if len(buckets) <= points:
        return list(buckets)
    share = -(-len(buckets) // points)
    groups = (buckets[at : at + share] for at in range(0, len(buckets), share))
    return [_group(group) for group in groups]


def _group(buckets: Sequence[Bucket]) -> Bucket:
    first = buckets[0]
    return Bucket(
        first.number,
        first.at_ms,
        first.moved_bytes,
        first.round,
        min(each.least for each in buckets),
        max(each.greatest for each in buckets),
        sum(each.total for each in buckets),
        sum(each.count for each in buckets),
    )


_FIELDS = {"time": "at_ms", "bytes": "moved_bytes", "round": "round"}
X_AXES = tuple(_FIELDS)


def series_answer(found: dict[str, list[Bucket]], x: str) -> dict[str, Any]:
    """Series for a chart: one axis for all of them, null where a series has no bucket.

    Args:
        found: Buckets by series.
        x: ``time`` (Unix ms), ``bytes`` or ``round``; the other two are told of each place, too.
    """
    field = _FIELDS[x]
    first: dict[int, Bucket] = {}
    by_place: dict[str, dict[int, Bucket]] = {}
    for name, buckets in found.items():
        by_place[name] = {getattr(each, field): each for each in buckets}
        first = {**by_place[name], **first}
    places = sorted(first)
    series = {}
    for name, known_buckets in by_place.items():
        rows = [known_buckets.get(place) for place in places]
        series[name] = {
            "min": [each.least if each else None for each in rows],
            "max": [each.greatest if each else None for each in rows],
            "mean": [each.total / each.count if each else None for each in rows],
        }
    axes = {name: [getattr(first[place], name) for place in places] for name in _FIELDS.values()}
    return {"x": places, **axes, "series": series}

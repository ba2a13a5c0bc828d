"""Series keep their extremes at every level of detail, however they were written and are read."""

import tempfile
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from dashboard_api.core.series import SeriesPoint, level_for, point_buckets, reduce_buckets
from dashboard_api.shell.history import HistoryStore, SeriesSpan, history_url

VALUES = st.lists(st.floats(-1e9, 1e9), min_size=1, max_size=300)


def points(values: list[float]) -> list[SeriesPoint]:
    return [
        SeriesPoint("loss", index, 1000 * index, value, 10 * index, index)
        for index, value in enumerate(values)
    ]


@given(VALUES, st.integers(0, 5), st.integers(1, 50))
def test_buckets_of_any_level_and_number_keep_every_extreme(
    values: list[float], level: int, wanted: int
) -> None:
    buckets = reduce_buckets(point_buckets(points(values), level), wanted)
    assert len(buckets) <= wanted
    assert min(each.least for each in buckets) == min(values)
    assert max(each.greatest for each in buckets) == max(values)
    assert sum(each.count for each in buckets) == len(values)


@given(st.integers(1, 10_000_000), st.integers(1, 4_000))
def test_a_span_is_read_with_few_rows_and_no_less_detail_than_asked_for(
    count: int, wanted: int
) -> None:
    level = level_for(count, wanted)
    assert level == 0 or count // 16**level >= wanted
    assert level == 5 or count // 16**level < 16 * wanted


@given(VALUES, st.integers(1, 40), st.lists(st.integers(1, 40), min_size=1, max_size=20))
@settings(max_examples=20)
def test_the_history_keeps_extremes_whatever_the_batches_and_counts_no_point_twice(
    values: list[float], wanted: int, sizes: list[int]
) -> None:
    given_points = points(values)
    with tempfile.TemporaryDirectory() as folder:
        history = HistoryStore(history_url("", Path(folder)))
        at, turn = 0, 0
        while at < len(given_points):
            size = sizes[turn % len(sizes)]
            # Each batch begins with points of the one before.
            history.add_points("job/a", given_points[max(0, at - 5) : at + size])
            at, turn = at + size, turn + 1
        buckets = history.series(SeriesSpan("job/a", "loss", wanted))
        history.close()
    assert len(buckets) <= wanted
    assert min(each.least for each in buckets) == min(values)
    assert max(each.greatest for each in buckets) == max(values)
    assert sum(each.count for each in buckets) == len(values)

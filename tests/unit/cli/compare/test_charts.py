"""The picture of a comparison."""

from itertools import pairwise
from xml.etree import ElementTree as ET

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hypergpu.cli.compare.chart import comparison_svg, levels, moved_bytes, seconds, ticks
from hypergpu.cli.compare.outcome import outcome
from tests.unit.cli.compare.given import report
from tests.unit.cli.compare.test_outcomes import RISING, compared

SPACE = "{http://www.w3.org/2000/svg}"


def test_levels_are_the_least_middle_and_most_of_the_seeds() -> None:
    runs = [
        outcome([report(metrics, seed=seed)])
        for seed, metrics in enumerate(((0.5, 0.7), (0.6, 0.9), (0.1, 0.8)), 1)
    ]
    found = levels(runs, seconds)
    assert found[0] == (1.0, 0.1, 0.5, 0.6)
    assert found[-1] == (2.0, 0.7, 0.8, 0.9)
    assert all(before.at < after.at for before, after in pairwise(found))


def test_a_run_that_ended_keeps_its_last_metric() -> None:
    runs = [outcome([report((0.5, 0.9))]), outcome([report(RISING, seed=2)])]
    assert levels(runs, seconds)[-1] == (3.0, 0.9, 0.9, 0.9)


def test_bytes_are_those_of_both_ways() -> None:
    found = levels([outcome([report((0.5, 0.9))])], moved_bytes)
    assert (found[0].at, found[-1].at) == (40.0, 80.0)


@given(
    st.lists(st.lists(st.floats(0, 1), min_size=1, max_size=6).map(tuple), min_size=1, max_size=4)
)
def test_the_middle_lies_within_the_band(curves: list[tuple[float, ...]]) -> None:
    runs = [outcome([report(metrics, seed=seed)]) for seed, metrics in enumerate(curves, 1)]
    for level in levels(runs, seconds):
        assert level.least <= level.median <= level.most


@given(st.floats(1e-3, 1e9), st.floats(1.2, 1e6))
def test_ticks_lie_on_the_axis_and_are_few(least: float, factor: float) -> None:
    found = ticks(least, least * factor)
    assert 1 <= len(found) <= 8
    assert all(least <= tick <= least * factor for tick in found)


def test_chart_has_a_line_a_strategy_in_both_panels_and_a_band_where_seeds_differ() -> None:
    steps = report((0.1,) * 5, round_ms=7000, target=0.0)
    found = compared(
        outcome([report(RISING, strategy="sync"), steps]),
        outcome([report(RISING, strategy="sync", seed=2), steps]),
        outcome([report(RISING)]),
        outcome([report((0.6, 0.9), seed=2)]),
    )
    picture = ET.fromstring(comparison_svg(found))  # noqa: S314 - our own picture
    lines = [each.get("class") for each in picture.iter(f"{SPACE}polyline")]
    bands = [each.get("class") for each in picture.iter(f"{SPACE}polygon")]
    words = [each.text or "" for each in picture.iter(f"{SPACE}text")]
    assert lines == ["sync worked-out", "aware", "sync worked-out", "aware"]
    assert bands == ["aware", "aware"]
    assert "sync (extrapolated)" in words
    assert "target 0.9" in words


@pytest.mark.parametrize("metrics", [(0.5,), (0.5, 0.5)])
def test_a_chart_of_next_to_nothing_is_drawn(metrics: tuple[float, ...]) -> None:
    late = outcome([report(metrics, is_valid=False)])
    text = comparison_svg(compared(late, baseline="aware"))
    assert "INVALID" in text
    ET.fromstring(text)  # noqa: S314 - our own picture

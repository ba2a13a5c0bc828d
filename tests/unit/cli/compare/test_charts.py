"""The picture of a comparison."""

from xml.etree import ElementTree as ET

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hypergpu.cli.compare.chart import comparison_svg, levels, seconds
from hypergpu.cli.compare.outcome import outcome
from tests.unit.cli.compare.given import report
from tests.unit.cli.compare.test_outcomes import RISING, comparison_of

SPACE = "{http://www.w3.org/2000/svg}"


@given(
    st.lists(st.lists(st.floats(0, 1), min_size=1, max_size=6).map(tuple), min_size=1, max_size=4)
)
def test_the_middle_lies_within_the_band(curves: list[tuple[float, ...]]) -> None:
    runs = [outcome([report(metrics, seed=seed)]) for seed, metrics in enumerate(curves, 1)]
    for level in levels(runs, seconds):
        assert level.least <= level.median <= level.most


def test_chart_has_a_line_a_strategy_in_both_panels_and_a_band_where_seeds_differ() -> None:
    steps = report((0.1,) * 5, round_ms=7000, target=0.0)
    found = comparison_of(
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
    text = comparison_svg(comparison_of(late, baseline="aware"))
    assert "INVALID" in text
    ET.fromstring(text)  # noqa: S314 - our own picture

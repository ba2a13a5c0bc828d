"""What the benchmark of a farm over lines tells, of Ray beside it or without Ray."""

from benchmarks.ours.farm.lines import blocked_figures, compared_figures
from benchmarks.peers.line_items import LineRate, RayBlocked, RayRates, line_texts


def test_ours_is_compared_with_the_faster_of_rays_two_ways() -> None:
    figures = compared_figures(LineRate(90.0), RayRates(bundles=60.0, singles=30.0), 2_000)
    assert figures.metrics["ray_over_ours_lines"] == 1.5
    assert figures.metrics["ray_single_over_ours_lines"] == 3.0
    other = compared_figures(LineRate(90.0), RayRates(bundles=30.0, singles=45.0), 2_000)
    assert other.metrics["ray_over_ours_lines"] == 2.0


def test_where_ray_does_not_start_its_reason_stands_in_place_of_a_figure() -> None:
    figures = blocked_figures(LineRate(90.0), RayBlocked("no route"))
    assert "ray_over_ours_lines" not in figures.metrics
    assert figures.rows[0][1] == "blocked"
    assert figures.notes == ["blocked, Ray over the lines: no route"]


def test_texts_are_distinct_also_from_those_that_warm_up() -> None:
    texts = [*line_texts(500), *line_texts(40, first=500)]
    assert len(set(texts)) == 540

"""Farm jobs in virtual time: liars are found, and names that are made afresh stop no job."""

import pytest

from benchmarks.ours.farm.fleet_share import busy_share, fleet_share
from benchmarks.ours.farm.liars import CASES, LiarCase, always_wrong, run_case, wrong_alike
from benchmarks.ours.farm.load import lost_or_doubled
from hypergpu.ids import Digest
from hypergpu.user.client.bundles import ResultView

ITEMS = 8_000


def test_liars_who_always_lie_get_nothing_accepted_for_a_little_more_work() -> None:
    # Of 100 nodes that nobody knows each does two small bundles that are compared: of a small job
    # that is a fifth.
    items = 20_000
    figures = run_case(CASES["always"], items, seed=3)
    assert figures.phase == "finished"
    assert figures.wrong_accepted == 0
    assert figures.computed_items < 1.1 * items
    free_figures = run_case(CASES["always"], ITEMS, seed=3, is_checked=False)
    assert free_figures.wrong_accepted > ITEMS // 20


def test_names_that_are_made_afresh_after_each_ban_stop_no_job() -> None:
    figures = run_case(CASES["new_names"], ITEMS, seed=1)
    assert figures.phase == "finished"
    assert figures.bans > 10
    assert figures.wrong_accepted < ITEMS // 1_000


@pytest.mark.parametrize("strategy", [always_wrong, wrong_alike])
def test_equal_seeds_give_equal_jobs(strategy: object) -> None:
    case = LiarCase(strategy)  # type: ignore[arg-type]
    assert run_case(case, 600, seed=7) == run_case(case, 600, seed=7)


def test_unequal_nodes_lose_little_to_each_other_and_end_together() -> None:
    shares = fleet_share(ITEMS, seed=1)
    assert shares.throughput_share >= 0.95
    assert shares.tail_share <= 0.08


def test_nodes_on_slow_lines_compute_more_of_the_time_with_two_open_bundles() -> None:
    one, two = (busy_share(4 * ITEMS, 1, queues_work=each) for each in (False, True))
    assert two > one + 0.1


def result(start: int, items: int) -> ResultView:
    """An accepted result of some items."""
    return ResultView(
        start=start,
        items=items,
        digest=Digest(""),
        size_bytes=0,
        node="",
        units=items,
        failures=0,
        tries=1,
    )


def test_items_that_are_lost_or_doubled_are_counted() -> None:
    assert lost_or_doubled([result(5, 5), result(0, 5)], 10) == 0
    assert lost_or_doubled([result(0, 5)], 10) == 5
    assert lost_or_doubled([result(0, 5), result(4, 6)], 10) == 1

"""From reports to a comparison and its table."""

import pytest

from hypergpu.cli.compare.outcome import (
    EXTRAPOLATED,
    Comparison,
    StrategyRun,
    UnmeasuredError,
    outcome,
    standings,
)
from hypergpu.cli.compare.table import footnotes, standings_table
from tests.unit.cli.compare.given import TARGET, report

RISING = (0.5, 0.7, 0.9)


def comparison_of(*outcomes: StrategyRun, baseline: str = "sync") -> Comparison:
    names = list(dict.fromkeys(each.strategy for each in outcomes))
    return Comparison(
        job="job",
        workload="digits-cnn",
        world="homes",
        backend="proxy",
        metric_name="accuracy",
        target=TARGET,
        baseline=baseline,
        strategies=standings(names, outcomes, baseline),
        outcomes=list(outcomes),
    )


def test_sync_takes_its_steps_from_the_lan_and_their_time_from_the_links() -> None:
    steps = report((0.1,) * 5, round_ms=7000, target=0.0)
    found = outcome([report(RISING, round_ms=20, strategy="sync"), steps])
    assert (found.how, found.step_us) == (EXTRAPOLATED, 7_000_000)
    assert found.to_target is not None
    assert (found.to_target.at_ms, found.to_target.bytes_up) == (21_000, 30)
    assert [each.at_ms for each in found.evaluations] == [7000, 14_000, 21_000]


def test_links_that_were_late_in_either_run_make_sync_invalid() -> None:
    steps = report((0.1,) * 5, target=0.0)
    assert not outcome([report(RISING, is_valid=False, strategy="sync"), steps]).is_valid
    late = outcome([report(RISING, strategy="sync"), report((0.1,) * 5, is_valid=False)])
    assert not late.is_valid
    assert late.verdict.startswith("INVALID")


def test_one_round_tells_no_time_of_a_step() -> None:
    with pytest.raises(UnmeasuredError, match="only 1 of its rounds"):
        outcome([report(RISING, strategy="sync"), report((0.1,))])


def test_standing_has_the_median_and_the_range_of_its_seeds() -> None:
    runs = [outcome([report(RISING, round_ms=n * 100, seed=n)]) for n in (1, 2, 6)]
    (found,) = standings(["aware"], runs, "aware")
    assert found.time_ms is not None
    assert (found.time_ms.median, found.time_ms.least, found.time_ms.most) == (600, 300, 1800)
    assert (found.runs, found.runs_reached, found.times_faster) == (3, 3, 1.0)


def test_ratios_are_the_baselines_amount_over_each_ones() -> None:
    slow = outcome([report((0.1, 0.5, 0.6, 0.7, 0.8, 0.9), strategy="sync")])
    fast = outcome([report(RISING, round_ms=100)])
    sync, aware = standings(["sync", "aware"], [slow, fast], "sync")
    assert (sync.times_faster, sync.times_fewer_bytes) == (1.0, 1.0)
    assert aware.times_faster == pytest.approx(20)
    assert aware.times_fewer_bytes == pytest.approx(2)


def test_a_strategy_that_missed_the_target_once_has_no_ratio() -> None:
    runs = [
        outcome([report(RISING, strategy="sync")]),
        outcome([report(RISING)]),
        outcome([report((0.5, 0.6), seed=2)]),
    ]
    _, aware = standings(["sync", "aware"], runs, "sync")
    assert (aware.runs_reached, aware.times_faster) == (1, None)


def test_table_says_what_was_missed_and_what_was_late() -> None:
    missed = outcome([report((0.5, 0.6), strategy="sync")])
    late = outcome([report(RISING, is_valid=False)])
    found = comparison_of(missed, late)
    assert not found.is_good
    columns, rows = standings_table(found)
    titles = [column.title for column in columns]
    assert titles[1] == "to accuracy 0.9"
    first, second = rows
    assert (len(first), len(second)) == (len(titles), len(titles))
    assert first[1:4] == ("not reached", "-", "-")
    assert second[-1] == "measured, INVALID 1 of 1"
    said = "\n".join(footnotes(found))
    assert "sync, seed 1: never reached accuracy 0.9, ended at 0.6000" in said
    assert "aware, seed 1: INVALID: 9 ms late" in said
    assert "extrapolated" not in said


def test_table_says_how_sync_was_worked_out() -> None:
    steps = report((0.1,) * 5, round_ms=7000, target=0.0)
    found = comparison_of(outcome([report(RISING, strategy="sync"), steps]))
    assert found.is_good
    assert any("counted on a LAN" in line and "7.00" in line for line in footnotes(found))

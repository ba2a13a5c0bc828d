"""`hypergpu compare`: runs that are ordered or refused, their outcomes, tables and the picture."""

from pathlib import Path
from xml.etree import ElementTree as ET

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hypergpu.digests import digest_of
from hypergpu.errors import HyperGPUError
from hypergpu.units import Bytes, Milliseconds, Samples
from hypergpu.user.client.history import EvaluationPoint, RoundPoint, target_reached_at
from netsim.compare.chart import comparison_svg, levels, seconds
from netsim.compare.compare import ComparisonOrder, kept_report, planned_runs, seed_runs
from netsim.compare.outcome import (
    EXTRAPOLATED,
    Comparison,
    StrategyRun,
    UnmeasuredError,
    footnotes,
    outcome,
    standings,
    standings_table,
)
from netsim.measure.lateness import LatenessVerdict
from netsim.run.report import RunReport
from tests.unit.cli.conftest import Hypergpu

TARGET = 0.9
ORDER = ComparisonOrder(
    job=Path("job.toml"),
    world=Path("homes.toml"),
    strategies=("sync", "aware"),
    seeds=2,
    backend="proxy",
    target=TARGET,
    out=Path("out"),
    sync_steps=20,
    worker="auto",
    give_up_after_s=60.0,
)


def report(
    metrics: tuple[float, ...],
    *,
    strategy: str = "aware",
    seed: int = 1,
    round_ms: int = 1000,
    target: float = TARGET,
    is_valid: bool = True,
) -> RunReport:
    """A job whose every round takes as long, moves 10 bytes up and 30 down, and is evaluated."""
    rounds = tuple(
        RoundPoint(
            number=number,
            duration_ms=Milliseconds(round_ms),
            ended_ms=Milliseconds(round_ms * number),
            samples=Samples(100),
            bytes_up=Bytes(10),
            bytes_down=Bytes(30),
        )
        for number in range(1, len(metrics) + 1)
    )
    evaluations = tuple(
        EvaluationPoint(
            round=number,
            at_ms=Milliseconds(round_ms * number),
            loss=None,
            metric=metric,
            samples=Samples(100 * number),
            bytes_up=Bytes(10 * number),
            bytes_down=Bytes(30 * number),
        )
        for number, metric in enumerate(metrics, 1)
    )
    return RunReport(
        world="homes",
        strategy=strategy,
        seed=seed,
        backend="proxy",
        phase="finished",
        reason="all rounds are done",
        rounds=rounds,
        metric=metrics[-1],
        verdict=LatenessVerdict(
            is_valid=is_valid, sentence="VALID: on time" if is_valid else "INVALID: 9 ms late"
        ),
        metric_name="accuracy",
        target=target,
        evaluations=evaluations,
        to_target=target_reached_at(evaluations, target, "accuracy"),
    )


def test_sync_is_counted_on_a_lan_and_timed_over_the_links() -> None:
    near, steps = planned_runs(ORDER._replace(backend="tunnel"), "sync", 3)
    assert "--lan" in near.words
    assert near.words[-2:] == ("--target", "0.9")
    assert "--lan" not in steps.words
    assert steps.words[-6:] == ("--backend", "tunnel", "--target", "0", "--rounds", "21")
    assert (near.name, steps.name) == ("sync-3-lan", "sync-3-steps")


def test_the_baseline_is_sync_or_the_first() -> None:
    assert ORDER._replace(strategies=("aware", "sync")).baseline == "sync"
    assert ORDER._replace(strategies=("diloco", "aware")).baseline == "diloco"


@pytest.mark.parametrize(
    ("strategies", "backend", "said"),
    [
        (("awre",), "proxy", 'did you mean "aware"'),
        (("x",), "proxy", "choose one of sync, fedavg, diloco"),
        ((), "proxy", "nothing to compare"),
        (("sync", "sync"), "proxy", "named twice"),
        (("sync",), "world", "choose one of proxy, tunnel"),
    ],
)
def test_what_names_nothing_is_refused(
    strategies: tuple[str, ...], backend: str, said: str
) -> None:
    with pytest.raises(HyperGPUError, match=said):
        ORDER._replace(strategies=strategies, backend=backend).check()


@pytest.mark.parametrize("kept", [b"", b"{}", b'{"key": "\xff"}'])
def test_a_kept_report_that_cannot_be_read_is_made_again(tmp_path: Path, kept: bytes) -> None:
    (run, *_) = seed_runs(ORDER, 1)
    (tmp_path / run.name).mkdir()
    (tmp_path / run.name / "report.json").write_bytes(kept)
    assert kept_report(run, digest_of(b"inputs"), tmp_path) is None


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
    sync_run = outcome([report(RISING, round_ms=20, strategy="sync"), steps])
    assert (sync_run.how, sync_run.step_us) == (EXTRAPOLATED, 7_000_000)
    assert sync_run.to_target is not None
    assert (sync_run.to_target.at_ms, sync_run.to_target.bytes_up) == (21_000, 30)
    assert [each.at_ms for each in sync_run.evaluations] == [7000, 14_000, 21_000]


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
    (aware_standing,) = standings(["aware"], runs, "aware")
    assert aware_standing.time_ms is not None
    assert (
        aware_standing.time_ms.median,
        aware_standing.time_ms.least,
        aware_standing.time_ms.most,
    ) == (600, 300, 1800)
    assert (aware_standing.runs, aware_standing.runs_reached, aware_standing.times_faster) == (
        3,
        3,
        1.0,
    )


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
    missed_run = outcome([report((0.5, 0.6), strategy="sync")])
    late = outcome([report(RISING, is_valid=False)])
    comparison = comparison_of(missed_run, late)
    assert not comparison.is_good
    columns, rows = standings_table(comparison)
    titles = [column.title for column in columns]
    assert titles[1] == "to accuracy 0.9"
    first, second = rows
    assert (len(first), len(second)) == (len(titles), len(titles))
    assert first[1:4] == ("not reached", "-", "-")
    assert second[-1] == "measured, INVALID 1 of 1"
    notes = "\n".join(footnotes(comparison))
    assert "sync, seed 1: never reached accuracy 0.9, ended at 0.6000" in notes
    assert "aware, seed 1: INVALID: 9 ms late" in notes
    assert "extrapolated" not in notes


def test_table_says_how_sync_was_worked_out() -> None:
    steps = report((0.1,) * 5, round_ms=7000, target=0.0)
    comparison = comparison_of(outcome([report(RISING, strategy="sync"), steps]))
    assert comparison.is_good
    assert any("counted on a LAN" in line and "7.00" in line for line in footnotes(comparison))


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
    comparison = comparison_of(
        outcome([report(RISING, strategy="sync"), steps]),
        outcome([report(RISING, strategy="sync", seed=2), steps]),
        outcome([report(RISING)]),
        outcome([report((0.6, 0.9), seed=2)]),
    )
    picture = ET.fromstring(comparison_svg(comparison))  # noqa: S314 - our own picture
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


@pytest.mark.parametrize("target", ["-1", "nan"])
def test_a_target_that_nothing_reaches_or_passes_is_wrong_usage(
    target: str, alone: Hypergpu, tmp_path: Path
) -> None:
    (tmp_path / "job.toml").write_text('workload = "digits-softmax"\n', "utf-8")
    (tmp_path / "homes.toml").write_text("", "utf-8")
    arguments = [str(tmp_path / "job.toml"), "--world", str(tmp_path / "homes.toml")]
    result = alone("compare", *arguments, "--out", str(tmp_path / "out"), "--target", target)
    assert (result.exit_code, result.stdout) == (2, "")
    assert "hypergpu compare --help" in result.stderr
    assert not (tmp_path / "out").exists()

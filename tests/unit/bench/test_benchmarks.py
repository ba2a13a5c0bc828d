"""Parts, tables and estimates of benchmarks; no benchmark is run."""

import asyncio
import io
from pathlib import Path

import msgspec
import numpy as np
import pytest
from rich.console import Console

from benchmarks.__main__ import choose
from benchmarks.metering import LEAST, IntervalEstimate, median_of
from benchmarks.netsim_fidelity import (
    LOSSY,
    TRIES,
    WORLDS,
    BackendFigures,
    ComparedWorld,
    Measurement,
    round_time_error,
)
from benchmarks.ours.cluster import BenchmarkError
from benchmarks.ours.table import (
    BenchmarkParts,
    PartFigures,
    ResultTable,
    machine,
    merge_rows,
    print_table,
    read_rows,
    rows_of,
    run_parts,
    write_rows,
)
from hypergpu.units import Milliseconds
from hypergpu.user.client.history import RoundPoint
from netsim.measure.lateness import ALWAYS_VALID
from netsim.network.world_file import parse_world
from netsim.run.report import RunReport


def break_off() -> PartFigures:
    raise BenchmarkError("it was late")


def whole(**parts: PartFigures) -> BenchmarkParts:
    measures = {name: (lambda part=part: part) for name, part in parts.items()}
    return BenchmarkParts(
        title="both",
        columns=("", "value"),
        parts={**measures, "broken": break_off},
        notes=lambda: ["two cores"],
    )


ONE = PartFigures(rows=[("a", "1")], metrics={"a": 1.0}, notes=["of a"])
TWO = PartFigures(rows=[("b", "2")], metrics={"b": 2.0})


def test_each_part_is_shown_as_it_ends_and_one_that_breaks_takes_no_other_with_it() -> None:
    shown_tables: list[ResultTable] = []
    table = run_parts(whole(one=ONE, two=TWO), ["one", "broken", "two"], shown_tables.append)
    assert [each.title for each in shown_tables] == ["both: one", "both: broken", "both: two"]
    assert shown_tables[0].rows == [("a", "1")]
    assert table.rows == [("a", "1"), ("b", "2")]
    assert table.metrics == {"a": 1.0, "b": 2.0}
    assert table.notes == ["of a", "MISSED, broken: it was late", "two cores"]


def test_a_part_alone_leaves_the_others_out() -> None:
    table = run_parts(whole(one=ONE, two=TWO), ["two"], lambda _: None)
    assert table.metrics == {"b": 2.0}


def test_only_a_run_of_all_parts_is_whole() -> None:
    every = BenchmarkParts(
        title="both", columns=("", "value"), parts={"one": lambda: ONE, "two": lambda: TWO}
    )
    assert not run_parts(every, ["one", "two"], lambda _: None).is_partial
    assert run_parts(every, ["one"], lambda _: None).is_partial
    assert run_parts(whole(one=ONE), ["one", "broken"], lambda _: None).is_partial


def test_a_part_is_named_behind_its_benchmark() -> None:
    assert choose("metering", is_quick=False) == ("metering", "")
    assert choose("metering/healthy", is_quick=False) == ("metering", "healthy")
    with pytest.raises(ValueError, match="metering has no part 'fast'; it has healthy, faults,"):
        choose("metering/fast", is_quick=False)
    with pytest.raises(ValueError, match="codec has no part 'fast'; it has none"):
        choose("codec/fast", is_quick=False)
    with pytest.raises(ValueError, match="there is no benchmark 'speed'; there are adaptive,"):
        choose("speed", is_quick=False)


TABLE = ResultTable(
    title="seconds per round",
    columns=("system", "1M", "25M"),
    rows=(("ours", "0.031", "0.9"), ("the floor", "0.012", "0.48")),
    metrics={"seconds_1m_2": 0.031},
    notes=("no training",),
)


def printed_text(table: ResultTable) -> str:
    out = io.StringIO()
    print_table(table, Console(file=out, width=100))
    return out.getvalue()


def test_a_piped_table_is_plain_and_aligned() -> None:
    assert [line.rstrip() for line in printed_text(TABLE).splitlines()] == [
        "seconds per round",
        "system        1M   25M",
        "ours       0.031   0.9",
        "the floor  0.012  0.48",
        "no training",
    ]


def test_rows_hold_key_value_date_machine_and_command(tmp_path: Path) -> None:
    path = tmp_path / "results" / "one.json"
    write_rows(rows_of({"a": 0.5}, "make bench ONLY=one", "2026-01-02"), path)
    assert msgspec.json.decode(path.read_bytes()) == [
        {
            "key": "a",
            "value": 0.5,
            "date": "2026-01-02",
            "machine": machine(),
            "command": "make bench ONLY=one",
        }
    ]


def test_later_rows_replace_those_of_the_same_key_alone(tmp_path: Path) -> None:
    path = tmp_path / "one.json"
    merge_rows(rows_of({"a": 1.0, "b": 1.0}, "make bench", "2026-01-02"), path)
    merge_rows(rows_of({"b": 2.0}, "make bench", "2026-01-03"), path)
    row_values = [(row.key, row.value, row.date) for row in read_rows(path)]
    assert row_values == [("a", 1.0, "2026-01-02"), ("b", 2.0, "2026-01-03")]


def test_the_median_lies_between_the_readings_that_a_sign_test_gives() -> None:
    # Of 20 readings the 6th and the 15th: Conover's table for a median at 95 %.
    assert median_of(range(1, 21)) == IntervalEstimate(10.5, 6.0, 15.0)


def test_the_order_of_readings_does_not_matter() -> None:
    assert (
        median_of([3, 1, 2, 6, 5, 4])
        == median_of([1, 2, 3, 4, 5, 6])
        == IntervalEstimate(3.5, 1, 6)
    )


def test_too_few_readings_have_no_interval() -> None:
    with pytest.raises(ValueError, match="5 readings have no interval"):
        median_of([1.0] * (LEAST - 1))


def test_nineteen_of_twenty_intervals_hold_what_readings_scatter_around() -> None:
    draw = np.random.default_rng(7)
    intervals = [median_of(list(draw.standard_cauchy(21))) for _ in range(500)]
    assert sum(each.low <= 0 <= each.high for each in intervals) >= 0.94 * len(intervals)


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (IntervalEstimate(0.0, -1.0, 0.9), ""),
        (IntervalEstimate(0.0, -1.0, 1.1), " not shown"),
        (IntervalEstimate(2.0, 1.1, 3.0), " MISSED"),
    ],
)
def test_a_limit_is_kept_missed_or_undecided(found: IntervalEstimate, said: str) -> None:
    assert found.verdict(1.0) == said


def report(*durations_ms: int) -> RunReport:
    return RunReport(
        world="homes",
        seed=1,
        backend="world",
        phase="finished",
        reason="",
        rounds=tuple(
            RoundPoint(number=number, duration_ms=Milliseconds(duration_ms))
            for number, duration_ms in enumerate(durations_ms, 1)
        ),
        metric=None,
        verdict=ALWAYS_VALID,
    )


def measure_with(figures: BackendFigures, *validities: bool) -> Measurement[int]:
    """Return the measurement that counts, of some that are valid or not, in this order."""
    left_measurements = [
        Measurement(number, is_valid) for number, is_valid in enumerate(validities)
    ]

    async def measure() -> Measurement[int]:
        return left_measurements.pop(0)

    return asyncio.run(figures.measure(measure))


def test_the_error_of_round_times_is_that_of_single_rounds_relative_to_the_real_ones() -> None:
    assert round_time_error(report(1100, 1800), report(1000, 2000)) == pytest.approx(0.1)


def test_what_a_backend_calls_invalid_is_measured_again_and_counted() -> None:
    figures = BackendFigures("proxy")
    assert measure_with(figures, False, True).found == 1
    assert figures.notes() == ["The proxy was late: measured again 1 times."]


def test_measuring_again_has_an_end_and_the_row_says_that_it_does_not_count() -> None:
    figures = BackendFigures("proxy")
    assert measure_with(figures, *[False] * TRIES) == Measurement(TRIES - 1, is_valid=False)
    figures.add("rate", 1, 2, "+100 %", valid=False)
    assert figures.rows[0][0] == "proxy: rate (INVALID)"
    assert figures.notes()[-1].endswith("rate")


@pytest.mark.parametrize("world", [*WORLDS, LOSSY], ids=lambda world: world.name)
def test_the_worlds_that_are_compared_have_eight_nodes(world: ComparedWorld) -> None:
    assert len(parse_world(world.text.replace("ROUNDS", "8"), source=world.name).nodes) == 8

"""Benchmarks in parts: figures of a part that ran are kept, whatever comes after it."""

import pytest

from benchmarks.__main__ import choose
from benchmarks.ours.cluster import BenchmarkError
from benchmarks.table import ResultTable
from benchmarks.table.parts import BenchmarkParts, PartFigures, run_parts


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
    shown: list[ResultTable] = []
    table = run_parts(whole(one=ONE, two=TWO), ["one", "broken", "two"], shown.append)
    assert [each.title for each in shown] == ["both: one", "both: broken", "both: two"]
    assert shown[0].rows == [("a", "1")]
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
    with pytest.raises(ValueError, match="there is no benchmark 'speed'; there are aggregate,"):
        choose("speed", is_quick=False)

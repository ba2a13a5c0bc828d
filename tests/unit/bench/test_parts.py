"""A benchmark in parts: what ended is kept, whatever comes after it."""

from pathlib import Path

import msgspec
import pytest

from benchmarks.__main__ import chosen
from benchmarks.ours.cluster import BenchmarkError
from benchmarks.table import Record, Table
from benchmarks.table.parts import Figures, Parts, measured, merge_record

COMMAND = "make bench ONLY=both"


def broken() -> Figures:
    raise BenchmarkError("it was late")


def whole(**parts: Figures) -> Parts:
    measures = {name: (lambda part=part: part) for name, part in parts.items()}
    return Parts(
        title="both",
        columns=("", "value"),
        parts={**measures, "broken": broken},
        notes=lambda: ["two cores"],
    )


ONE = Figures(rows=[("a", "1")], metrics={"a": 1.0}, notes=["of a"])
TWO = Figures(rows=[("b", "2")], metrics={"b": 2.0})


def read(path: Path) -> Record:
    return msgspec.json.decode(path.read_bytes(), type=Record)


def test_each_part_is_told_as_it_ends_and_one_that_breaks_takes_no_other_with_it() -> None:
    told: list[Table] = []
    table = measured(whole(one=ONE, two=TWO), ["one", "broken", "two"], told.append)
    assert [each.title for each in told] == ["both: one", "both: broken", "both: two"]
    assert told[0].rows == [("a", "1")]
    assert table.rows == [("a", "1"), ("b", "2")]
    assert table.metrics == {"a": 1.0, "b": 2.0}
    assert table.notes == ["of a", "MISSED, broken: it was late", "two cores"]


def test_a_part_alone_leaves_the_others_out() -> None:
    table = measured(whole(one=ONE, two=TWO), ["two"], lambda _: None)
    assert table.metrics == {"b": 2.0}


def test_the_figures_of_parts_come_together_in_the_record(tmp_path: Path) -> None:
    path = tmp_path / "both.json"
    merge_record(Record("here", COMMAND, {"a": 1.0, "b": 1.0}), path)
    merge_record(Record("here", COMMAND, {"b": 2.0}), path)
    assert read(path) == Record("here", f"{COMMAND}, its parts one by one", {"a": 1.0, "b": 2.0})


@pytest.mark.parametrize(
    ("machine", "command"), [("there", COMMAND), ("here", f"{COMMAND} QUICK=1")]
)
def test_figures_of_another_machine_or_effort_are_not_mixed_in(
    tmp_path: Path, machine: str, command: str
) -> None:
    path = tmp_path / "both.json"
    merge_record(Record(machine, command, {"a": 1.0}), path)
    merge_record(Record("here", COMMAND, {"b": 2.0}), path)
    assert read(path).metrics == {"b": 2.0}


def test_a_part_is_named_behind_its_benchmark() -> None:
    assert chosen("metering", is_quick=False) == ("metering", "")
    assert chosen("metering/healthy", is_quick=False) == ("metering", "healthy")
    with pytest.raises(ValueError, match="metering has no part 'fast'; it has healthy, faults,"):
        chosen("metering/fast", is_quick=False)
    with pytest.raises(ValueError, match="codec has no part 'fast'; it has none"):
        chosen("codec/fast", is_quick=False)
    with pytest.raises(ValueError, match="there is no benchmark 'speed'; there are aggregate,"):
        chosen("speed", is_quick=False)

import io
from pathlib import Path

import msgspec
from rich.console import Console

from benchmarks.table import (
    ResultTable,
    machine,
    merge_rows,
    print_table,
    read_rows,
    rows_of,
    write_rows,
)

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
    found = [(row.key, row.value, row.date) for row in read_rows(path)]
    assert found == [("a", 1.0, "2026-01-02"), ("b", 2.0, "2026-01-03")]

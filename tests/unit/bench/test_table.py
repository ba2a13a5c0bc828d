import io
from pathlib import Path

import msgspec
from rich.console import Console

from benchmarks.table import Record, Table, machine, print_table, write_record

TABLE = Table(
    title="seconds per round",
    columns=("system", "1M", "25M"),
    rows=(("ours", "0.031", "0.9"), ("the floor", "0.012", "0.48")),
    metrics={"seconds_1m_2": 0.031},
    notes=("no training",),
)


def printed(table: Table) -> str:
    out = io.StringIO()
    print_table(table, Console(file=out, width=100))
    return out.getvalue()


def test_a_piped_table_is_plain_and_aligned() -> None:
    assert [line.rstrip() for line in printed(TABLE).splitlines()] == [
        "seconds per round",
        "system        1M   25M",
        "ours       0.031   0.9",
        "the floor  0.012  0.48",
        "no training",
    ]


def test_a_record_holds_machine_command_and_metrics(tmp_path: Path) -> None:
    path = tmp_path / "results" / "one.json"
    write_record(Record(machine(), "make bench ONLY=one", TABLE.metrics), path)
    assert msgspec.json.decode(path.read_bytes()) == {
        "machine": machine(),
        "command": "make bench ONLY=one",
        "metrics": {"seconds_1m_2": 0.031},
    }

"""Tables at the widths of terminals: tests/vectors/cli/tables.txt holds what people see."""

from collections.abc import Sequence
from pathlib import Path

import pytest
from msgspec.structs import replace

from hypergpu.cli.job import jobs_table, participants_table
from hypergpu.cli.node import nodes_table
from hypergpu.client.values import (
    EstimateView,
    JobDetail,
    JobView,
    NodeView,
    ParticipantView,
    ReadingView,
)
from hypergpu.terminal.output import Column, Table, table_lines

VECTORS = Path(__file__).parents[3] / "vectors/cli/tables.txt"
WIDTHS = (40, 80, 100, 120)
LOSES = "its uplink of 0.9 Mbit/s takes longer than a round: it trains 4 steps in place of 20"
JOB = JobView(
    id="job-0123456789ab",
    name="digits",
    phase="training",
    reason="round 3 is open: 2 of 3 updates are there",
    round=3,
    rounds=12,
    nodes=3,
    loss=0.4213,
    metric=0.9127,
    metric_name="accuracy",
    bytes_up=1_200_000,
    bytes_down=34_000_000,
    updates_accepted=8,
    updates_refused=1,
    samples=5_120,
    model="ab" * 32,
    at_ms=12_000,
)
UNMEASURED = ReadingView(None, None, None, None, None, None, None)
NODE = NodeView(
    id="0x" + "ab" * 20,
    state="training",
    reason="",
    device="cuda:0",
    device_name="NVIDIA H100 80GB HBM3",
    memory_bytes=80_000_000_000,
    worker="torch",
    workloads={},
    job=JOB.id,
    last_seen_ms_ago=800,
    software="0.1.0",
    updates_accepted=8,
    updates_refused=0,
    reading=ReadingView(
        EstimateView(52_000, 2_500, 12, 800),
        50_000,
        EstimateView(0.012, 0.005, 80, 9_000),
        EstimateView(6e6, 5e5, 3, 4_000),
        EstimateView(80e6, 5e6, 3, 4_000),
        EstimateView(41_000, 900, 60, 100),
        "bbr",
    ),
    health="normal",
    health_reason="normal: H=20, int4",
    name="attic",
)
NODES = [
    NODE,
    replace(NODE, id="0x" + "cd" * 20, name="garden-shed", reason=LOSES, health="low"),
    replace(
        NODE,
        id="0x" + "ef" * 20,
        name="",
        state="lost",
        reason="not heard of for 15 s",
        job=None,
        health=None,
        reading=UNMEASURED,
    ),
]
JOBS = [
    JOB,
    replace(JOB, id="job-ba9876543210", name="", phase="paused", reason="paused by its user"),
]
DETAIL = JobDetail(
    JOB,
    {},
    [
        ParticipantView(NODES[0].id, 0, "accepted", 20, 20, 0.4, "", "attic"),
        ParticipantView(NODES[1].id, 1, "training", 3, 4, 0.5, LOSES, "garden-shed"),
        ParticipantView(NODES[2].id, 2, "lost", 0, 20, None, "not heard of for 15 s", ""),
    ],
    1000,
)
TABLES: dict[str, Table] = {
    "node ls": nodes_table(NODES),
    "job ls": jobs_table(JOBS),
    "job show": participants_table(DETAIL),
}


def all_tables() -> str:
    """Every table at every width."""
    return "".join(
        f"# {name} at {width} columns\n" + "".join(f"{line}\n" for line in lines) + "\n"
        for name, (columns, rows) in TABLES.items()
        for width in WIDTHS
        for lines in [table_lines(columns, rows, width)]
    )


def test_tables_are_what_people_were_shown_before() -> None:
    assert all_tables() == VECTORS.read_text("utf-8")


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", TABLES)
def test_each_row_begins_with_its_name_and_has_its_state_and_reason(name: str, width: int) -> None:
    columns, rows = TABLES[name]
    lines = table_lines(columns, rows, width)
    assert max(map(len, lines)) <= width
    for row in rows:
        (at,) = (at for at, line in enumerate(lines) if _begins(line, row[0]))
        end = next((n for n in range(at + 1, len(lines)) if _begins(lines[n])), len(lines))
        words = " ".join(lines[at:end]).split()
        for cell in (row[1], row[2], *row[-1].split()):
            assert cell in {*words, "-"}


def _begins(line: str, name: str = "") -> bool:
    return not line.startswith(" ") and (not name or name in line.split()[:2])


def test_a_row_that_fits_nowhere_is_a_block_with_long_words_kept() -> None:
    columns = (Column("node"), Column("digest"))
    rows: Sequence[Sequence[str]] = [("attic", "ab" * 32)]
    lines = table_lines(columns, rows, 40)
    assert "".join(line[10:] for line in lines[1:]) == "ab" * 32

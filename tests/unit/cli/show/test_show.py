"""What people see of a job: figures, tables at the widths of terminals, its course.

tests/vectors/cli/tables.txt holds the tables.
"""

import os
import subprocess
import sys
from collections.abc import Sequence
from io import StringIO
from pathlib import Path

import pytest
from msgspec.structs import replace
from rich.console import Console

from hypergpu.units import Bytes, Milliseconds, Samples
from hypergpu.user.cli.job_tables import job_lines, jobs_table, participants_table
from hypergpu.user.cli.lacking_nodes import lacking_nodes
from hypergpu.user.cli.node import nodes_table
from hypergpu.user.client.history import (
    EvaluationPoint,
    History,
    metric_after,
    target_reached_at,
    with_event_recorded,
)
from hypergpu.user.client.values import (
    EstimateView,
    HealthHistoryView,
    HealthView,
    JobDetail,
    JobEvent,
    JobView,
    NodeView,
    ParticipantView,
    ReadingView,
    job_view,
)
from hypergpu.user.terminal.output import Column, Table, span, table_lines
from hypergpu.user.terminal.watch import (
    JobProgress,
    screen,
    with_event,
    with_job,
    with_participants,
)
from tests.unit.cli.fake_service import EVENTS, NODE, summary

PARTICIPANT = ParticipantView(NODE, 0, "pending", 5, 20, 0.7, "", "attic")


def progress_of_events() -> JobProgress:
    progress = with_job(JobProgress(), job_view(summary()), (PARTICIPANT,))
    for sequence, (kind, body) in enumerate(EVENTS):
        progress = with_event(progress, JobEvent(sequence, sequence, kind, body))
    return progress


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.04, "0.0 s"), (59, "59 s"), (150, "2 min 30 s"), (9000, "2 h 30 min"), (2e5, "2 d 7 h")],
)
def test_span_is_in_the_units_of_people(seconds: float, text: str) -> None:
    assert span(seconds) == text


def test_round_takes_the_metric_of_the_model_it_made() -> None:
    history = progress_of_events().history
    (point,) = history.rounds
    assert (point.number, point.loss) == (1, 0.25)
    assert metric_after(history, point.number) == 0.9


def test_screen_shows_job_nodes_rounds_and_notes() -> None:
    sink = StringIO()
    Console(file=sink, width=120, force_terminal=False).print(
        screen(progress_of_events(), 120, title="the title")
    )
    text = sink.getvalue()
    for expected_text in (
        "the title",
        "round 2/4",
        "attic",
        "5/20",
        "0.9000",
        "attic was lost: not heard of",
    ):
        assert expected_text in text


def plan_event(number: int, nodes: dict[str, tuple[int, str]], resting: dict[str, str]) -> JobEvent:
    shares = {
        name: {"inner_steps": steps, "codec": codec, "reason": f"H={steps}, {codec}"}
        for name, (steps, codec) in nodes.items()
    }
    plan = {"round": number, "reason": "H=9 by bytes", "nodes": shares, "resting": resting}
    return JobEvent(number, number, "RoundPlanned", {"plan": plan})


def test_later_only_nodes_whose_plan_changed_are_told() -> None:
    other = "0x" + "cd" * 20
    progress = with_event(
        progress_of_events(), plan_event(0, {NODE: (20, "int4"), other: (5, "int4")}, {})
    )
    progress = with_event(progress, plan_event(1, {NODE: (20, "int4"), other: (5, "topk64")}, {}))
    assert progress.plan_news == ("round 2, 0xcdcdcdcd...: H=5, topk64",)
    progress = with_event(progress, plan_event(2, {other: (5, "topk64")}, {NODE: "too slow"}))
    assert progress.plan_news == ("round 3, attic: rests: too slow",)
    progress = with_event(progress, plan_event(3, {other: (5, "topk64")}, {NODE: "too slow"}))
    assert progress.plan_news == ()


def test_screen_shows_the_plan_of_each_node_where_there_is_one() -> None:
    planned_part = ParticipantView(NODE, 0, "pending", 5, 20, 0.7, "H=20, int4, uplink 6", "attic")
    progress = with_participants(progress_of_events(), (planned_part,))
    progress = with_event(progress, plan_event(1, {NODE: (20, "int4")}, {}))
    sink = StringIO()
    Console(file=sink, width=160, force_terminal=False).print(screen(progress, 160))
    assert "H=20, int4, uplink 6" in sink.getvalue()
    # Plans decide how many rounds there are.
    assert "round 2/4" not in sink.getvalue()
    assert "round 2, 640 samples" in sink.getvalue()


VECTORS = Path(__file__).parents[3] / "vectors/cli/tables.txt"
WIDTHS = (40, 80, 100, 120)
LOSES = "its uplink of 0.9 Mbit/s takes longer than a round: it trains 4 steps in place of 20"
TABLED_JOB = JobView(
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
    updates_rejected=1,
    samples=5_120,
    model="ab" * 32,
    at_ms=12_000,
)
UNMEASURED = ReadingView(None, None, None, None, None, None, None)
TABLED_NODE = NodeView(
    id="0x" + "ab" * 20,
    state="training",
    reason="",
    device="cuda:0",
    device_name="NVIDIA H100 80GB HBM3",
    memory_bytes=80_000_000_000,
    worker="torch",
    workloads={},
    job=TABLED_JOB.id,
    last_seen_ms_ago=800,
    software="0.1.0",
    updates_accepted=8,
    updates_rejected=0,
    reading=ReadingView(
        EstimateView(52_000, 2_500, 12, 800),
        50_000,
        EstimateView(0.012, 0.005, 80, 9_000),
        EstimateView(6e6, 5e5, 3, 4_000),
        EstimateView(80e6, 5e6, 3, 4_000),
        EstimateView(41_000, 900, 60, 100),
        "bbr",
    ),
    health=HealthView(0.83, "high", 0.75, 0.9, 0.85, 0.95, "speed 0.75 lowers it most", 0),
    health_history=HealthHistoryView(1, (0.8, None, 0.83)),
    plan_reason="H=20, int4",
    name="attic",
)
LOW_HEALTH = replace(TABLED_NODE.health, value=0.41, level="low")
NODES = [
    TABLED_NODE,
    replace(TABLED_NODE, id="0x" + "cd" * 20, name="garden-shed", reason=LOSES, health=LOW_HEALTH),
    replace(
        TABLED_NODE,
        id="0x" + "ef" * 20,
        name="",
        state="lost",
        reason="not heard of for 15 s",
        job=None,
        reading=UNMEASURED,
    ),
]
JOBS = [
    TABLED_JOB,
    replace(
        TABLED_JOB, id="job-ba9876543210", name="", phase="paused", reason="paused by its user"
    ),
]
DETAIL = JobDetail(
    TABLED_JOB,
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


def test_a_planned_job_shows_how_much_of_its_samples_is_done() -> None:
    planned_job = replace(TABLED_JOB, round=13, planned_samples=10_240)
    _, rows = jobs_table([TABLED_JOB, planned_job])
    assert [row[3] for row in rows] == ["3/12", "13, 50 %"]


def test_a_served_model_has_rounds_and_a_loss_only_where_its_ring_trains() -> None:
    served_job = replace(TABLED_JOB, name="chat", round=0, rounds=0, loss=None, nodes=3)
    _, rows = jobs_table([served_job])
    assert "-" in rows[0]
    lines = job_lines(replace(DETAIL, job=served_job, spec={}))
    assert [line.split()[0] for line in lines[1:]] == ["phase", "kind"]
    trained_lines = job_lines(
        replace(DETAIL, job=replace(served_job, round=1, rounds=3, loss=2.5), spec={})
    )
    assert "  round     1 of 3 stored" in trained_lines
    assert "  loss      2.5000" in trained_lines


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


@pytest.mark.parametrize("columns", ["", "60"])
def test_a_pipe_gets_whole_lines_unless_columns_says_how_wide(columns: str) -> None:
    program = """
from hypergpu.user.terminal.output import Column, say_table
say_table([Column("node"), Column("reason", folds=True)], [("attic", "word " * 30)], empty="")
"""
    environment = {**os.environ, "COLUMNS": columns}
    command = [sys.executable, "-c", program]
    process = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    widest = max(map(len, process.stdout.splitlines()))
    assert widest <= 60 if columns else widest > 150


BEGAN_AT_MS = 700_000


def round_event(number: int, at_ms: int, duration_ms: int) -> JobEvent:
    body: dict[str, object] = {
        "round": number,
        "participants": 2,
        "updates": 2,
        "samples": 100,
        "bytes_up": 10,
        "bytes_down": 30,
        "duration_ms": duration_ms,
    }
    return JobEvent(number, BEGAN_AT_MS + at_ms, "RoundRecorded", body)


def evaluation_event(number: int, at_ms: int, metric: float | None) -> JobEvent:
    body: dict[str, object] = {
        "round": number,
        "loss": 0.5,
        "metric": metric,
        "metric_name": "accuracy",
    }
    return JobEvent(0, BEGAN_AT_MS + at_ms, "EvaluationReady", body)


def history_of(*events: JobEvent) -> History:
    history = History()
    for event in events:
        history = with_event_recorded(history, event)
    return history


def point(number: int, metric: float | None) -> EvaluationPoint:
    return EvaluationPoint(
        round=number,
        at_ms=Milliseconds(1000 * number),
        loss=None,
        metric=metric,
        samples=Samples(100 * number),
        bytes_up=Bytes(10 * number),
        bytes_down=Bytes(20 * number),
    )


def test_time_counts_from_when_the_first_round_was_opened() -> None:
    history = history_of(round_event(0, 2000, 2000), round_event(1, 3500, 1500))
    assert [each.ended_ms for each in history.rounds] == [2000, 3500]
    assert [each.number for each in history.rounds] == [1, 2]


def test_a_round_tells_what_was_planned_for_it_and_how_far_the_forecast_was_off() -> None:
    bare = round_event(0, 2000, 2000)
    plan_fields = {"inner_steps": 40, "codecs": {"int4": 3, "topk64": 1}, "forecast_error": 0.125}
    (planned_round,) = history_of(
        JobEvent(0, bare.at_ms, bare.kind, {**bare.body, **plan_fields})
    ).rounds
    assert (planned_round.inner_steps, planned_round.codecs) == (40, {"int4": 3, "topk64": 1})
    assert planned_round.forecast_error == 0.125
    (unplanned_round,) = history_of(bare).rounds
    assert (unplanned_round.codecs, unplanned_round.forecast_error) == ({}, None)


def test_evaluation_stands_where_its_model_was_made_however_long_judging_took() -> None:
    history = history_of(
        round_event(0, 2000, 2000), round_event(1, 3500, 1500), evaluation_event(1, 3600, 0.5)
    )
    (evaluation,) = history.evaluations
    assert (evaluation.at_ms, evaluation.samples, evaluation.bytes_up, evaluation.bytes_down) == (
        2000,
        100,
        10,
        30,
    )
    assert history.metric_name == "accuracy"


def test_a_metric_that_is_no_number_is_no_metric() -> None:
    (evaluation,) = history_of(round_event(0, 10, 10), evaluation_event(1, 20, None)).evaluations
    assert evaluation.metric is None


def test_target_is_reached_between_two_evaluations() -> None:
    there = target_reached_at([point(2, 0.5), point(4, 0.9)], 0.6, "accuracy")
    assert there is not None
    assert (there.at_ms, there.samples, there.bytes_up, there.bytes_down) == (2500, 250, 25, 50)
    assert there.rounds == 3


def test_the_first_time_counts_even_when_it_is_lost_again() -> None:
    there = target_reached_at(
        [point(1, 0.5), point(2, 0.7), point(3, 0.4), point(4, 0.9)], 0.7, "accuracy"
    )
    assert there is not None
    assert there.at_ms == 2000


def test_a_perplexity_is_reached_from_above() -> None:
    there = target_reached_at([point(1, 100.0), point(3, 60.0)], 80.0, "perplexity")
    assert there is not None
    assert there.at_ms == 2000


def test_what_diverged_between_is_passed_over() -> None:
    there = target_reached_at([point(1, 0.5), point(2, None), point(3, 0.9)], 0.7, "accuracy")
    assert there is not None
    assert there.at_ms == 2000


@pytest.mark.parametrize("target", [0.95, 0.0])
def test_a_target_that_was_missed_or_not_set_is_never_reached(target: float) -> None:
    assert target_reached_at([point(1, 0.5), point(2, 0.9)], target, "accuracy") is None


def test_nodes_that_do_not_offer_a_workload_are_named_with_what_installs_it() -> None:
    offering_node = replace(TABLED_NODE, workloads={"hf-causal-lm": 1})
    (line,) = lacking_nodes([*NODES[:1], offering_node, NODES[2]], "hf-causal-lm")
    assert line.startswith("attic does not offer hf-causal-lm. Fix there: pip install")
    assert "'hypergpu[hf]'" in line
    (line,) = lacking_nodes(NODES[:1], "spirals")
    assert "install the package that has spirals" in line


def test_no_node_lacks_the_workload_of_a_job_that_has_none() -> None:
    assert lacking_nodes(NODES, "") == []


def test_nodes_with_another_version_of_a_workload_are_told_which_is_wanted() -> None:
    older, same, newer = (
        replace(TABLED_NODE, workloads={"digits-mlp": version}) for version in (1, 2, 3)
    )
    lines = lacking_nodes([older, same, newer], "digits-mlp", 2)
    assert lines == [
        "attic has digits-mlp 1, the job wants 2. Fix there: pip install -U 'hypergpu[torch]'",
        "attic has digits-mlp 3, the job wants 2. Fix here: pip install -U 'hypergpu[torch]'",
    ]

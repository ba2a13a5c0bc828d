"""Figures, tables and the fold of a job's events."""

from io import StringIO

import pytest
from rich.console import Console

from hypergpu.client.history import metric_after
from hypergpu.client.translation import job_view
from hypergpu.client.values import JobEvent, ParticipantView
from hypergpu.terminal.figures import span
from hypergpu.terminal.progress import (
    JobProgress,
    with_event,
    with_job,
    with_participants,
)
from hypergpu.terminal.screen import screen
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
    shown = sink.getvalue()
    for expected in (
        "the title",
        "round 2/4",
        "attic",
        "0xabababab...",
        "5/20",
        "0.9000",
        "not heard of",
    ):
        assert expected in shown


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

"""Figures, tables and the fold of a job's events."""

from io import StringIO

import pytest
from rich.console import Console

from hypergpu.client.history import metric_after
from hypergpu.client.translation import job_view
from hypergpu.client.values import JobEvent, ParticipantView
from hypergpu.terminal.figures import short, size, span
from hypergpu.terminal.output import Column, plain_table
from hypergpu.terminal.progress import (
    JobProgress,
    event_note,
    with_event,
    with_job,
    with_participants,
)
from hypergpu.terminal.screen import bar, screen
from tests.unit.cli.fake_service import EVENTS, NODE, summary

PARTICIPANT = ParticipantView(NODE, 0, "pending", 5, 20, 0.7, "", "attic")


def folded() -> JobProgress:
    progress = with_job(JobProgress(), job_view(summary()), (PARTICIPANT,))
    for sequence, (kind, body) in enumerate(EVENTS):
        progress = with_event(progress, JobEvent(sequence, sequence, kind, body))
    return progress


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1200, "1.2 kB"),
        (105_000, "105 kB"),
        (999_600, "1 MB"),
        (25_000_000_000, "25 GB"),
        (5 * 10**15, "5000 TB"),
    ],
)
def test_size_has_at_most_three_digits_and_a_unit(count: int, text: str) -> None:
    assert size(count) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.04, "0.0 s"), (59, "59 s"), (150, "2 min 30 s"), (9000, "2 h 30 min"), (2e5, "2 d 7 h")],
)
def test_span_is_in_the_units_of_people(seconds: float, text: str) -> None:
    assert span(seconds) == text


def test_long_names_are_cut_and_short_ones_are_not() -> None:
    assert short(NODE) == "0xabababab..."
    assert short("node") == "node"


def test_numbers_are_aligned_to_the_right() -> None:
    lines = plain_table([Column("a"), Column("n", is_number=True)], [("x", "5"), ("long", "50")])
    assert lines == ["A      N", "x      5", "long  50"]


@pytest.mark.parametrize(
    ("done", "total", "filled"), [(0, 20, 0), (5, 20, 4), (20, 20, 18), (9, 0, 0)]
)
def test_bar_keeps_its_width(done: int, total: int, filled: int) -> None:
    assert bar(done, total).count("\u2501") == filled
    assert len(bar(done, total)) == 18


def test_round_takes_the_metric_of_the_model_it_made() -> None:
    history = folded().history
    (point,) = history.rounds
    assert (point.number, point.loss) == (1, 0.25)
    assert metric_after(history, point.number) == 0.9


def test_next_sequence_is_behind_the_last_event() -> None:
    assert folded().next_sequence == len(EVENTS)


def test_participants_stay_on_the_screen_between_rounds() -> None:
    assert with_participants(folded(), ()).participants == (PARTICIPANT,)


def test_unknown_event_is_no_note() -> None:
    assert event_note(JobEvent(0, 0, "FromTheFuture", {})) == ""


def test_screen_shows_job_nodes_rounds_and_notes() -> None:
    sink = StringIO()
    Console(file=sink, width=120, force_terminal=False).print(
        screen(folded(), 120, title="the title")
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


def planned(number: int, nodes: dict[str, tuple[int, str]], resting: dict[str, str]) -> JobEvent:
    shares = {
        name: {"inner_steps": steps, "codec": codec, "reason": f"H={steps}, {codec}"}
        for name, (steps, codec) in nodes.items()
    }
    plan = {"round": number, "reason": "H=9 by bytes", "nodes": shares, "resting": resting}
    return JobEvent(number, number, "RoundPlanned", {"plan": plan})


def test_a_first_plan_is_told_by_its_reason() -> None:
    progress = with_event(folded(), planned(0, {NODE: (20, "int4")}, {}))
    assert progress.plan_news == ("round 1: H=9 by bytes",)


def test_later_only_nodes_whose_plan_changed_are_told() -> None:
    other = "0x" + "cd" * 20
    progress = with_event(folded(), planned(0, {NODE: (20, "int4"), other: (5, "int4")}, {}))
    progress = with_event(progress, planned(1, {NODE: (20, "int4"), other: (5, "topk64")}, {}))
    assert progress.plan_news == ("round 2, 0xcdcdcdcd...: H=5, topk64",)
    progress = with_event(progress, planned(2, {other: (5, "topk64")}, {NODE: "too slow"}))
    assert progress.plan_news == ("round 3, attic: rests: too slow",)
    progress = with_event(progress, planned(3, {other: (5, "topk64")}, {NODE: "too slow"}))
    assert progress.plan_news == ()


def test_another_batch_is_told_as_other_steps_are() -> None:
    progress = with_event(folded(), planned(0, {NODE: (1, "int4")}, {}))
    share = {"inner_steps": 1, "codec": "int4", "batch_size": 24, "reason": "batch 24 of 32"}
    plan = {"round": 1, "reason": "H=1", "nodes": {NODE: share}, "resting": {}}
    for number, news in ((1, ("round 2, attic: batch 24 of 32",)), (2, ())):
        progress = with_event(progress, JobEvent(number, number, "RoundPlanned", {"plan": plan}))
        assert progress.plan_news == news


def test_screen_shows_the_plan_of_each_node_where_there_is_one() -> None:
    planned_part = ParticipantView(NODE, 0, "pending", 5, 20, 0.7, "H=20, int4, uplink 6", "attic")
    progress = with_participants(folded(), (planned_part,))
    progress = with_event(progress, planned(1, {NODE: (20, "int4")}, {}))
    sink = StringIO()
    Console(file=sink, width=160, force_terminal=False).print(screen(progress, 160))
    assert "H=20, int4, uplink 6" in sink.getvalue()
    # Plans decide how many rounds there are.
    assert "round 2/4" not in sink.getvalue()
    assert "round 2, 640 samples" in sink.getvalue()

"""What single events and levels make of the feed's state."""

from typing import Any

from dashboard_api.core.lanes import exact_segments, received_segments, segment
from dashboard_api.core.projection import SEEN_STEP_MS, FeedProjection
from dashboard_api.core.state import LANES_KEPT
from dashboard_api.core.wall_clock import Anchor, WallClock, journal_distance_ms
from hypergpu.client import JobEvent, ParticipantView
from tests.dashboard_journal import JOB, START_MS, journal, node_id, nodes_seen, summary


def fold(*events: tuple[str, dict[str, Any]]) -> FeedProjection:
    projection = FeedProjection("somewhere:7700")
    for sequence, (kind, body) in enumerate(events):
        at_ms = START_MS + 100 * sequence
        projection.take_event(JOB, JobEvent(sequence, 0, kind, body), at_ms)
    return projection


def job(projection: FeedProjection) -> Any:
    return projection.state["jobs"][JOB]


def plan(number: int = 0, *nodes: int) -> tuple[str, dict[str, Any]]:
    parts = {node_id(each): {"inner_steps": 9, "codec": "int4"} for each in nodes or (1,)}
    return "RoundPlanned", {"plan": {"round": number, "nodes": parts, "deadline_ms": 50}}


def update_received(number: int = 0, **update: Any) -> tuple[str, dict[str, Any]]:
    given = {"blob": {"size_bytes": 7}, "inner_steps": 9, **update}
    return "UpdateReceived", {"node": node_id(1), "round": number, "update": given}


def test_a_planned_round_has_lanes_and_a_deadline_before_anything_is_done() -> None:
    opened = job(fold(plan()))["rounds_by_number"]["0"]
    assert opened["deadline_at_ms"] == START_MS + 50
    lane = opened["lanes"][node_id(1)]
    assert lane["result"] == "pending"
    assert lane["segments"] == [segment("download", START_MS, None)]


def test_reported_durations_become_exact_segments() -> None:
    update = {"phases": {"download_ms": 10, "train_ms": 50, "upload_ms": 40}}
    segments, is_estimate = received_segments([segment("download", 0, None)], update, 100)
    assert not is_estimate
    assert [(each["phase"], each["start_ms"], each["end_ms"]) for each in segments] == [
        ("download", 0, 10),
        ("train", 10, 60),
        ("upload", 60, 100),
        ("wait", 100, None),
    ]


def test_durations_that_exceed_the_time_are_cut() -> None:
    cut = exact_segments(0, {"download_ms": 80, "train_ms": 80, "upload_ms": 9}, 100)
    assert [each["end_ms"] for each in cut] == [80, 100]


def test_an_update_without_durations_has_borders_that_are_called_estimates() -> None:
    lane = job(fold(plan(), update_received(compute_ms=40)))["rounds_by_number"]["0"]["lanes"][
        node_id(1)
    ]
    assert lane["is_estimate"]
    assert [each["phase"] for each in lane["segments"]] == ["download", "train", "upload", "wait"]
    assert lane["segments"][1]["end_ms"] - lane["segments"][1]["start_ms"] == 40


def test_progress_that_is_seen_draws_the_borders() -> None:
    projection = fold(plan())

    def progress(done: int, at_ms: int) -> None:
        seen = ParticipantView(node_id(1), 0, "pending", done, 9, 0.5, "", "")
        projection.take_progress(JOB, [seen], START_MS + at_ms)

    progress(0, 20)
    progress(3, 30)
    progress(9, 70)
    lane = job(projection)["rounds_by_number"]["0"]["lanes"][node_id(1)]
    phases = [(each["phase"], each["start_ms"] - START_MS) for each in lane["segments"]]
    assert phases == [("download", 0), ("train", 30), ("upload", 70)]
    assert job(projection)["levels"][node_id(1)]["phase"] == "upload"


def test_rounds_that_nobody_planned_open_with_their_first_progress() -> None:
    projection = fold(("JobCreated", {"spec": {"training": {"batch_size": 32}}}))
    seen = ParticipantView(node_id(1), 0, "pending", 0, 9, None, "", "")
    projection.take_progress(JOB, [seen], START_MS)
    lanes = job(projection)["rounds_by_number"]["0"]["lanes"]
    assert lanes[node_id(1)]["inner_steps"] == 9


def test_a_rejected_update_is_told_with_its_reason_at_lane_and_node() -> None:
    projection = FeedProjection("somewhere:7700")
    projection.take_nodes(nodes_seen(1), START_MS)
    rejected = {"node": node_id(1), "round": 0, "reason": "it is not finite"}
    for sequence, (kind, body) in enumerate((plan(), ("UpdateRejected", rejected))):
        projection.take_event(JOB, JobEvent(sequence, 0, kind, body), START_MS)
    lane = job(projection)["rounds_by_number"]["0"]["lanes"][node_id(1)]
    assert (lane["result"], lane["result_reason"]) == ("rejected", "it is not finite")
    assert projection.state["nodes"][node_id(1)]["rejections"][0]["reason"] == "it is not finite"


def test_an_update_that_is_missing_at_the_end_is_lost() -> None:
    body = {"round": 0, "model": {"blob": {"digest": "x"}}}
    opened = job(fold(plan(0, 1, 2), update_received(), ("AggregateReady", body)))[
        "rounds_by_number"
    ]["0"]
    results = {node: lane["result"] for node, lane in opened["lanes"].items()}
    assert results == {node_id(1): "accepted", node_id(2): "lost"}
    assert all(
        each["end_ms"] is not None for lane in opened["lanes"].values() for each in lane["segments"]
    )


def test_the_cost_is_the_score_by_the_price() -> None:
    spec = {"pay": {"unit_price": 2_000_000}}
    measured = {"contribution": {"node": node_id(1), "samples": 100}, "quality_bps": 5_000}
    body = {"round": 0, "updates": [measured]}
    found = job(fold(("JobCreated", {"spec": spec}), plan(), ("RoundMeasured", body)))
    assert (found["score"], found["cost"]) == (500_000, "1000000")


def test_old_rounds_leave_the_state_before_it_grows_without_bound() -> None:
    nodes = tuple(range(300))
    rounds = [plan(number, *nodes) for number in range(12)]
    kept = job(fold(*rounds))["rounds_by_number"]
    assert sum(len(each["lanes"]) for each in kept.values()) <= LANES_KEPT
    assert "11" in kept


def test_a_nodes_last_contact_is_sent_in_steps_alone() -> None:
    projection = FeedProjection("somewhere:7700")
    projection.take_nodes(nodes_seen(1), START_MS)
    projection.take_changes()
    projection.take_nodes(nodes_seen(1), START_MS + SEEN_STEP_MS - 1)
    assert projection.take_changes() == []
    projection.take_nodes(nodes_seen(1), START_MS + SEEN_STEP_MS)
    assert len(projection.take_changes()) == 3


def test_jobs_and_nodes_that_are_gone_leave_the_state() -> None:
    projection = FeedProjection("somewhere:7700")
    projection.take_jobs([summary()])
    projection.take_nodes(nodes_seen(1), START_MS)
    projection.take_jobs([])
    projection.take_nodes([], START_MS)
    assert projection.state["jobs"] == projection.state["nodes"] == {}


def test_sentences_count_rounds_from_one() -> None:
    recorded = {"round": 0, "reason": "round 0 closed: all are there", "duration_ms": 1}
    projection = fold(("DeadlineReached", {"round": 0}), ("RoundRecorded", recorded))
    texts = [each["text"] for each in job(projection)["events"]]
    assert texts == ["round 1 reached its deadline", "round 1 closed: all are there"]
    assert job(projection)["rounds_by_number"]["0"]["reason"] == texts[1]


def test_job_time_is_told_in_wall_clock_time_across_downtime() -> None:
    clock = WallClock([])
    assert clock.note(500, 10_500) == Anchor(0, 10_000)
    assert clock.note(900, 10_950) is None
    assert clock.note(1_000, 71_000) == Anchor(1_000, 70_000)
    assert [clock.unix_ms(job_ms) for job_ms in (0, 999, 1_000)] == [10_000, 10_999, 71_000]


def test_an_update_tells_when_an_old_job_began() -> None:
    distance_ms = journal_distance_ms(journal(5))
    assert distance_ms is not None
    assert abs(distance_ms - START_MS) < 60_000
    assert journal_distance_ms([]) is None

"""What single events and levels make of the feed's state."""

from typing import Any

from msgspec.structs import replace

from dashboard_api.core.lanes import exact_segments, received_segments, segment
from dashboard_api.core.projection import SEEN_STEP_MS, FeedProjection
from dashboard_api.core.state import LANES_KEPT, OUTPUTS_KEPT
from dashboard_api.core.wall_clock import Anchor, WallClock, journal_distance_ms
from hypergpu.journal.events import JournalledUpdate, PhaseTimes
from hypergpu.user.client import JobEvent
from tests.dashboard_journal import (
    JOB,
    SPEC,
    START_MS,
    journal,
    levels,
    measured_work,
    node_id,
    nodes_seen,
    summary,
)


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
    update_fields = {"blob": {"digest": "aa", "size_bytes": 7}, "inner_steps": 9, **update}
    return "UpdateReceived", {"node": node_id(1), "round": number, "update": update_fields}


def test_a_planned_round_has_lanes_and_a_deadline_before_anything_is_done() -> None:
    open_round = job(fold(plan()))["rounds_by_number"]["0"]
    assert open_round["deadline_at_ms"] == START_MS + 50
    lane = open_round["lanes"][node_id(1)]
    assert lane["result"] == "pending"
    assert lane["segments"] == [segment("download", START_MS, None)]


def test_the_quorum_is_the_one_that_the_journal_tells() -> None:
    events = [("JobCreated", {"job_id": JOB, "spec": SPEC}), plan(0, 1, 2, 3, 4, 5)]
    events[1][1]["plan"]["updates_needed"] = 2
    assert job(fold(*events))["rounds_by_number"]["0"]["updates_needed"] == 2
    round_record = (
        "RoundRecorded",
        {"round": 0, "updates_needed": 1, "reason": "round 0 closed: "},
    )
    assert job(fold(*events, round_record))["rounds_by_number"]["0"]["updates_needed"] == 1


def test_the_quorum_of_a_journal_that_does_not_tell_it_follows_from_who_takes_part() -> None:
    creation = ("JobCreated", {"job_id": JOB, "spec": SPEC})
    planned_round = job(fold(creation, plan(0, 1, 2, 3, 4, 5)))["rounds_by_number"]["0"]
    assert planned_round["updates_needed"] == 3
    unplanned_round = job(fold(creation, update_received()))["rounds_by_number"]["0"]
    assert unplanned_round["updates_needed"] == 1


def test_reported_durations_become_exact_segments() -> None:
    update = JournalledUpdate(phases=PhaseTimes(download_ms=10, train_ms=50, upload_ms=40))
    segments, is_estimate = received_segments([segment("download", 0, None)], update, 100)
    assert not is_estimate
    assert [(each["phase"], each["start_ms"], each["end_ms"]) for each in segments] == [
        ("download", 0, 10),
        ("train", 10, 60),
        ("upload", 60, 100),
        ("wait", 100, None),
    ]


def spans(segments: list[Any]) -> list[tuple[str, int, int | None]]:
    return [(each["phase"], each["start_ms"], each["end_ms"]) for each in segments]


def test_what_was_seen_stays_before_the_durations_of_the_newest_lease() -> None:
    earlier_segments = [segment("download", 0, 30), segment("train", 30, None)]
    update = JournalledUpdate(phases=PhaseTimes(train_ms=20, upload_ms=10))
    segments, _ = received_segments(earlier_segments, update, 100)
    assert spans(segments) == [
        ("download", 0, 30),
        ("train", 30, 90),
        ("upload", 90, 100),
        ("wait", 100, None),
    ]


def test_durations_that_exceed_the_time_are_cut() -> None:
    cut = exact_segments({"download_ms": 80, "train_ms": 80, "wait_ms": 9}, 0, 100)
    assert spans(cut) == [("download", 0, 11), ("train", 11, 91), ("wait", 91, 100)]


def test_a_pause_is_drawn_as_one_in_every_lane() -> None:
    update: dict[str, Any] = {
        "phases": {"download_ms": 100, "train_ms": 150, "upload_ms": 50},
    }
    projection = fold(
        plan(0, 1, 2),
        update_received(**update),
        ("JobPaused", {}),
        ("JobResumed", {}),
        ("UpdateReceived", {"node": node_id(2), "round": 0, "update": update}),
    )
    round_tree = job(projection)["rounds_by_number"]["0"]
    early, late = (
        [
            (phase, start - START_MS)
            for phase, start, _ in spans(round_tree["lanes"][each]["segments"])
        ]
        for each in (node_id(1), node_id(2))
    )
    assert early == [("train", 0), ("upload", 50), ("wait", 100), ("pause", 200), ("wait", 300)]
    assert late == [("download", 0), ("pause", 200), ("train", 300), ("upload", 350), ("wait", 400)]
    assert round_tree["deadline_at_ms"] == START_MS + 150


def test_a_paused_lane_is_not_continued_by_progress_and_takes_an_update_that_was_on_its_way() -> (
    None
):
    projection = fold(plan(), ("JobPaused", {}))
    projection.take_levels([levels(steps_done=20)], START_MS + 150)
    lane = ("lanes", node_id(1), "segments")

    def segments() -> list[Any]:
        value = job(projection)["rounds_by_number"]["0"]
        for name in lane:
            value = value[name]
        return [(each["phase"], each["start_ms"] - START_MS) for each in value]

    assert segments() == [("download", 0), ("pause", 100)]
    kind, body = update_received(phases={"upload_ms": 70})
    projection.take_event(JOB, JobEvent(2, 0, kind, body), START_MS + 160)
    assert segments() == [("download", 0), ("upload", 90), ("pause", 160)]


def test_an_update_without_durations_has_borders_that_are_called_estimates() -> None:
    lane = job(fold(plan(), update_received(compute_ms=40)))["rounds_by_number"]["0"]["lanes"][
        node_id(1)
    ]
    assert lane["is_estimate"]
    assert [each["phase"] for each in lane["segments"]] == ["download", "train", "upload", "wait"]
    assert lane["segments"][1]["end_ms"] - lane["segments"][1]["start_ms"] == 40


def test_progress_that_is_seen_draws_the_borders() -> None:
    projection = fold(plan())

    for steps_done, at_ms in ((0, 20), (3, 30), (20, 70)):
        projection.take_levels([levels(steps_done=steps_done)], START_MS + at_ms)
    lane = job(projection)["rounds_by_number"]["0"]["lanes"][node_id(1)]
    phases = [(each["phase"], each["start_ms"] - START_MS) for each in lane["segments"]]
    assert phases == [("download", 0), ("train", 30), ("upload", 70)]
    assert job(projection)["levels"][node_id(1)]["phase"] == "upload"


def test_rounds_that_nobody_planned_open_with_their_first_progress() -> None:
    projection = fold(("JobCreated", {"job_id": JOB, "spec": {"training": {"batch_size": 32}}}))
    projection.take_levels([levels(1), levels(2)], START_MS)
    lanes = job(projection)["rounds_by_number"]["0"]["lanes"]
    assert [lanes[node_id(each)]["inner_steps"] for each in (1, 2)] == [20, 20]


def test_levels_wait_for_the_events_of_their_round() -> None:
    projection = fold(plan(), update_received())
    projection.take_levels([levels(phase="train", round=1, steps_done=7)], START_MS)
    assert job(projection)["levels"] == {}
    for sequence, (kind, body) in enumerate((("AggregateReady", {"round": 0}), plan(1)), 2):
        projection.take_event(JOB, JobEvent(sequence, 0, kind, body), START_MS + 300)
    assert job(projection)["levels"][node_id(1)]["steps_done"] == 7
    lane = job(projection)["rounds_by_number"]["1"]["lanes"][node_id(1)]
    assert lane["segments"][-1]["phase"] == "train"


def test_levels_outweigh_a_list_of_nodes_until_they_are_told_no_more() -> None:
    projection = fold(plan())
    projection.take_nodes(nodes_seen(1), START_MS)
    projection.take_levels([levels(state="pending", round_trip_us=7)], START_MS)
    projection.take_nodes(nodes_seen(2), START_MS)
    assert projection.state["nodes"][node_id(1)]["rtt_us"] == 7
    projection.forget_levels()
    projection.take_nodes(nodes_seen(2), START_MS)
    assert projection.state["nodes"][node_id(1)]["rtt_us"] != 7


def test_a_node_that_was_away_is_told_with_the_time() -> None:
    projection = FeedProjection("somewhere:7700")
    projection.take_nodes(nodes_seen(1), START_MS)
    for state, at_ms in (
        ("working", 0),
        ("away", 100),
        ("away", 200),
        ("idle", 900),
        ("away", 950),
    ):
        projection.take_levels([replace(levels(), state=state)], START_MS + at_ms)
    assert projection.state["nodes"][node_id(1)]["absences"] == [
        {"from_ms": START_MS + 100, "to_ms": START_MS + 900},
        {"from_ms": START_MS + 950, "to_ms": None},
    ]


def test_a_node_has_the_mean_error_of_its_newest_forecasts() -> None:
    projection = FeedProjection("somewhere:7700")
    projection.take_nodes(nodes_seen(1), START_MS)
    for number, took_ms in enumerate((80, 100)):
        kind, body = plan(number)
        body["plan"]["nodes"][node_id(1)]["forecast_ms"] = 100
        opened_ms = START_MS + 1000 * number
        projection.take_event(JOB, JobEvent(2 * number, 0, kind, body), opened_ms)
        kind, body = update_received(number)
        projection.take_event(JOB, JobEvent(2 * number + 1, 0, kind, body), opened_ms + took_ms)
    # A quarter off, then exact; the newest counts a quarter.
    assert projection.state["nodes"][node_id(1)]["forecast_error"] == 0.188


def test_what_a_plan_gave_a_node_is_not_shown_for_its_next_job() -> None:
    projection = FeedProjection("somewhere:7700")
    projection.take_nodes(nodes_seen(1), START_MS)
    join_event = ("NodeJoined", {"node": node_id(1)})
    for sequence, (kind, body) in enumerate((plan(), join_event)):
        projection.take_event(JOB, JobEvent(sequence, 0, kind, body), START_MS)
    assert projection.state["nodes"][node_id(1)]["codec"] is None


def test_a_rejected_update_is_told_with_its_reason_at_lane_and_node() -> None:
    projection = FeedProjection("somewhere:7700")
    projection.take_nodes(nodes_seen(1), START_MS)
    rejection = {"node": node_id(1), "round": 0, "reason": "it is not finite"}
    for sequence, (kind, body) in enumerate((plan(), ("UpdateRejected", rejection))):
        projection.take_event(JOB, JobEvent(sequence, 0, kind, body), START_MS)
    lane = job(projection)["rounds_by_number"]["0"]["lanes"][node_id(1)]
    assert (lane["result"], lane["result_reason"]) == ("rejected", "it is not finite")
    assert projection.state["nodes"][node_id(1)]["rejections"][0]["reason"] == "it is not finite"


def test_an_update_that_is_missing_at_the_end_is_lost() -> None:
    body = {"round": 0, "model": {"blob": {"digest": "x", "size_bytes": 0}}}
    open_round = job(fold(plan(0, 1, 2), update_received(), ("AggregateReady", body)))[
        "rounds_by_number"
    ]["0"]
    results = {node: lane["result"] for node, lane in open_round["lanes"].items()}
    assert results == {node_id(1): "accepted", node_id(2): "lost"}
    assert all(
        each["end_ms"] is not None
        for lane in open_round["lanes"].values()
        for each in lane["segments"]
    )


def test_the_cost_is_what_the_ledger_pays_each_node_for_its_score() -> None:
    spec = {"pay": {"unit_price": 3}}
    works = [measured_work(node_id(each), 0, 5_000, samples=100) for each in (1, 2)]
    creation = ("JobCreated", {"job_id": JOB, "spec": spec})
    measured_job = job(fold(creation, plan(), ("RoundMeasured", {"round": 0, "updates": works})))
    assert (measured_job["score"], measured_job["cost"]) == (1_000_000, "2")


def test_old_rounds_leave_the_state_before_it_grows_without_bound() -> None:
    nodes = tuple(range(300))
    rounds = [plan(number, *nodes) for number in range(12)]
    kept_rounds = job(fold(*rounds))["rounds_by_number"]
    assert sum(len(each["lanes"]) for each in kept_rounds.values()) <= LANES_KEPT
    assert "11" in kept_rounds


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


def test_a_node_that_tries_again_with_less_in_memory_is_awaited_and_the_page_says_why() -> None:
    node, reason = node_id(1), "H=9, int4; micro-batch 4 of 8: a larger one ran out of memory"
    back = {"node": node, "round": 0, "reason": "out of memory"}
    projection = fold(
        ("ShardHandedBack", back), ("MemoryFitted", {"node": node, "round": 0, "reason": reason})
    )
    lane = job(projection)["rounds_by_number"]["0"]["lanes"][node]
    assert (lane["result"], lane["reason"]) == ("pending", reason)
    assert lane["segments"][-1]["end_ms"] is None
    assert reason in job(projection)["events"][-1]["text"]
    update_body = {"node": node, "round": 1, "update": {}}
    projection.take_event(JOB, JobEvent(2, 0, "UpdateReceived", update_body), START_MS)
    later = job(projection)["rounds_by_number"]["1"]["lanes"][node]
    assert later["reason"] == reason


def test_sentences_count_rounds_from_one() -> None:
    record_body = {"round": 0, "reason": "round 0 closed: all are there", "duration_ms": 1}
    projection = fold(("DeadlineReached", {"round": 0}), ("RoundRecorded", record_body))
    texts = [each["text"] for each in job(projection)["events"]]
    assert texts == ["a time limit of round 1 has passed", "round 1 closed: all are there"]
    assert job(projection)["rounds_by_number"]["0"]["reason"] == texts[1]


def test_rounds_in_reasons_count_from_one() -> None:
    kind, body = plan(0, 1, 2)
    body["plan"]["reason"] = "round 0: 2 taking part"
    void = {"node": node_id(1), "round": 0, "reason": "the lease of round 0 is void"}
    loss_body = {"node": node_id(2), "reason": "silent since round 0"}
    job_state = job(fold((kind, body), ("UpdateRejected", void), ("NodeLost", loss_body)))
    open_round = job_state["rounds_by_number"]["0"]
    assert open_round["reason"] == "round 1: 2 taking part"
    reasons = [lane["result_reason"] for lane in open_round["lanes"].values()]
    assert reasons == ["the lease of round 1 is void", "silent since round 1"]
    assert all("round 0" not in each["text"] for each in job_state["events"])


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
    # One clock that is a day off moves nothing.
    nonces = {"a": START_MS, "b": START_MS + 86_400_000, "c": START_MS + 20}
    journal_events = [
        JobEvent(
            number, 0, "UpdateReceived", {"node": node, "round": 0, "update": {"nonce": nonce}}
        )
        for number, (node, nonce) in enumerate(nonces.items())
    ]
    assert journal_distance_ms(journal_events) == START_MS + 20


def evaluation_ready(number: int, *outputs: str) -> tuple[str, dict[str, Any]]:
    score = {"loss": 0.5, "metric": 0.9, "metric_name": "accuracy"}
    return "EvaluationReady", {"round": number, **score, "outputs": [*outputs]}


def test_the_newest_outputs_of_the_model_are_told_beside_examples_that_stand_once() -> None:
    examples = [{"image": "aGk=", "label": "3"}, {"text": "def "}]
    first = (
        "ModelInitialised",
        {"model": {"blob": {"digest": "", "size_bytes": 0}}, "examples": examples},
    )
    evaluations = [evaluation_ready(each, "8", "main") for each in range(OUTPUTS_KEPT + 2)]
    job_state = job(fold(first, *evaluations))
    assert job_state["examples"] == [
        {"text": "", "image": "data:image/png;base64,aGk=", "label": "3"},
        {"text": "def ", "image": "", "label": ""},
    ]
    samples = job_state["samples_of_output"]
    assert [each["round"] for each in samples] == [*range(2, OUTPUTS_KEPT + 2)]
    at_ms = START_MS + 100 * (OUTPUTS_KEPT + 2)
    assert samples[-1] == {"round": OUTPUTS_KEPT + 1, "at_ms": at_ms, "outputs": ["8", "main"]}


def test_journals_without_examples_tell_no_output() -> None:
    first: tuple[str, dict[str, Any]] = (
        "ModelInitialised",
        {"model": {"blob": {"digest": "", "size_bytes": 0}}},
    )
    old = "EvaluationReady", {"round": 1, "loss": 0.5, "metric": 0.9, "metric_name": "accuracy"}
    job_state = job(fold(first, old, evaluation_ready(2, "8")))
    assert (job_state["examples"], job_state["samples_of_output"]) == ([], [])


def test_evaluations_have_the_held_out_loss_and_further_metrics_of_their_round() -> None:
    projection = FeedProjection("somewhere:7700")
    score = {"loss": 0.5, "metric": 2.5, "metric_name": "mae", "metrics": {"r2": 0.75}}
    kinds: list[tuple[str, dict[str, Any]]] = [
        ("JobCreated", {"job_id": JOB, "spec": SPEC, "round": None}),
        (
            "ModelInitialised",
            {"model": {"blob": {"digest": "", "size_bytes": 0}}, "target_mode": ""},
        ),
        ("EvaluationReady", {"round": 0, **score, "samples": 10, "samples_all": 40}),
        ("RoundPlanned", {"plan": {"round": 0, "nodes": {}, "resting": {}}}),
        ("EvaluationReady", {"round": 1, **score, "metrics": {"r2": 0.9}}),
    ]
    for sequence, (kind, body) in enumerate(kinds):
        projection.take_event(JOB, JobEvent(sequence, sequence, kind, body), START_MS + sequence)
    job = projection.state["jobs"][JOB]
    assert job["initial"] == {
        "loss": 0.5,
        "metric": 2.5,
        "metrics": {"r2": 0.75},
        "samples": 10,
        "samples_all": 40,
    }
    assert job["target_mode"] == "min"
    round_ = job["rounds_by_number"]["0"]
    assert (round_["held_out_loss"], round_["metric"], round_["metrics"]) == (0.5, 2.5, {"r2": 0.9})

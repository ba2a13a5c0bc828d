"""Alerts: each begins with its cause, says what to do, and ends with its cause."""

from typing import Any

import pytest

from dashboard_api.core.alerts import (
    DISK_LEAST_BYTES,
    STUCK_AFTER_MS,
    UNPAID_AFTER_MS,
    Surroundings,
    standing_alerts,
)
from dashboard_api.core.projection import FeedProjection
from dashboard_api.core.state import NodePay, PaymentsState
from hypergpu.user.client import JobEvent
from tests.dashboard_journal import JOB, SPEC, START_MS, journal, node_id, nodes_seen, summary

NOW = Surroundings(START_MS)


def training_job() -> FeedProjection:
    """A job whose first round is open on three nodes."""
    projection = FeedProjection("somewhere:7700")
    projection.take_jobs([summary()])
    for event in journal(3, rounds=1):
        projection.take_event(JOB, event, START_MS)
        if event.kind == "RoundPlanned":
            break
    return projection


def kinds(projection: FeedProjection, around: Surroundings = NOW) -> list[str]:
    alerts = standing_alerts(projection.state, around)
    assert all(each["fix"] and each["reason"] for each in alerts.values())
    return [each["kind"] for each in alerts.values()]


def recorded_losses(losses: list[float]) -> FeedProjection:
    projection = FeedProjection("somewhere:7700")
    projection.take_jobs([summary()])
    for number, loss in enumerate(losses):
        body: dict[str, Any] = {"round": number, "loss": loss, "duration_ms": 10, "reason": ""}
        event = JobEvent(number, number, "RoundRecorded", body)
        projection.take_event(JOB, event, START_MS + number)
    return projection


def test_nothing_is_wrong_with_a_job_that_moves() -> None:
    projection = training_job()
    projection.take_nodes(nodes_seen(1), START_MS)
    around = Surroundings(START_MS, {JOB: START_MS - 1}, DISK_LEAST_BYTES)
    assert kinds(projection, around) == []


def test_a_job_in_which_nothing_happens_is_stuck_after_two_minutes() -> None:
    projection = training_job()
    for idle_ms, expected_kinds in ((STUCK_AFTER_MS - 1, []), (STUCK_AFTER_MS, ["stuck"])):
        around = Surroundings(START_MS, {JOB: START_MS - idle_ms})
        assert kinds(projection, around) == expected_kinds


def test_a_job_that_waits_or_is_paused_is_not_stuck() -> None:
    projection = training_job()
    around = Surroundings(START_MS, {JOB: 0})
    for phase in ("waiting", "paused", "finished"):
        projection.take_jobs([summary(phase=phase)])
        assert kinds(projection, around) == []


@pytest.mark.parametrize(
    ("losses", "expected"),
    [
        ([2.0, 1.0, 1.2, 1.4, 1.6], ["diverging"]),
        ([2.0, 1.0, 1.2, 1.4, 1.3], []),
        ([2.0, 1.9, 1.0, 1.1, 1.2], []),
    ],
)
def test_a_job_diverges_when_its_loss_has_risen_for_three_rounds(
    losses: list[float], expected: list[str]
) -> None:
    assert kinds(recorded_losses(losses)) == expected


def test_a_node_of_a_running_job_that_is_away_is_lost_until_it_is_back() -> None:
    projection = training_job()
    projection.take_nodes(nodes_seen(1, state="away"), START_MS)
    alerts = standing_alerts(projection.state, NOW)
    assert {each["kind"] for each in alerts.values()} == {"node-lost"}
    assert alerts[f"node-lost/{node_id(0)}"]["job"] == JOB
    projection.take_nodes(nodes_seen(1, state="idle"), START_MS)
    assert kinds(projection) == []


def test_a_full_disk_is_told_where_it_is_known() -> None:
    around = Surroundings(START_MS, disk_free_bytes=DISK_LEAST_BYTES - 1)
    assert kinds(FeedProjection("somewhere:7700"), around) == ["disk-low"]


def test_pay_that_is_owed_and_a_halted_chain_are_told() -> None:
    projection = training_job()
    owed_pay = NodePay(receipts=1, worth="10", paid="4")
    payments = PaymentsState(worth="10", paid="4", halted="no funds", nodes={node_id(0): owed_pay})
    projection.take_payments(JOB, payments, 18)
    assert kinds(projection) == ["chain-halted"]
    end = JobEvent(99, 0, "JobEnded", {"phase": "finished", "reason": "all rounds are done"})
    projection.take_event(JOB, end, START_MS)
    late = Surroundings(START_MS + UNPAID_AFTER_MS + 1)
    assert kinds(projection, late) == ["chain-halted", "unpaid"]


def test_an_alert_keeps_the_time_at_which_it_began() -> None:
    projection = training_job()
    first = Surroundings(START_MS, {JOB: 0})
    projection.take_alerts(standing_alerts(projection.state, first))
    again = standing_alerts(projection.state, Surroundings(START_MS + 5_000, {JOB: 0}))
    assert again[f"stuck/{JOB}"]["at_ms"] == START_MS
    projection.take_alerts({})
    assert projection.state["alerts"] == {}
    assert SPEC["name"] in again[f"stuck/{JOB}"]["title"]

"""Alerts: what a person should act on, each with its reason and its fix. Judged from the state."""

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from dashboard_api.core.changes import JsonObject
from dashboard_api.core.state import AlertState
from hypergpu.journal.text import score, short
from hypergpu.user.client.values import ENDED
from hypergpu.user.terminal.output import size, span

STUCK_AFTER_MS = 120_000
STUCK_ROUNDS = 4
"""A job is stuck when nothing happened for as long as so many rounds take."""
DISK_LEAST_BYTES = 2 << 30
UNPAID_AFTER_MS = 3_600_000
DIVERGING_FACTOR = 1.5
DIVERGING_ROUNDS = 3
AWAY_STATES = frozenset({"away"})
_MOVING = frozenset({"planning", "training", "aggregating", "finishing", "preparing"})


class Surroundings(msgspec.Struct, frozen=True):
    """What alerts depend on besides the state."""

    now_ms: int
    moved_at_ms: Mapping[str, int] = {}
    """When the newest event of a job was journalled, by job."""
    disk_free_bytes: int | None = None
    """Free space of the disk with the coordinator's data; None: the disk is another machine's."""


def standing_alerts(state: JsonObject, around: Surroundings) -> dict[str, JsonObject]:
    """Alerts that stand now, by id. One that stood before keeps the time at which it began."""
    before: JsonObject = state.get("alerts") or {}
    alerts: dict[str, JsonObject] = {}
    for alert_id, alert in _alerts(state, around):
        earlier_alert = before.get(alert_id)
        began_ms = earlier_alert["at_ms"] if earlier_alert else around.now_ms
        alerts[alert_id] = msgspec.to_builtins(msgspec.structs.replace(alert, at_ms=began_ms))
    return alerts


def _alerts(state: JsonObject, around: Surroundings) -> Iterator[tuple[str, AlertState]]:
    jobs: JsonObject = state.get("jobs") or {}
    for job_id, job in jobs.items():
        for alert in _job_alerts(job, around):
            yield f"{alert.kind}/{job_id}", alert
    for node_id, node in (state.get("nodes") or {}).items():
        if node_alert := _node_alert(node, jobs):
            yield f"{node_alert.kind}/{node_id}", node_alert
    if around.disk_free_bytes is not None and around.disk_free_bytes < DISK_LEAST_BYTES:
        yield (
            "disk-low",
            _alert(
                "disk-low",
                "critical",
                "The coordinator's disk is almost full",
                f"{size(around.disk_free_bytes)} are free where the coordinator keeps its data",
                "remove jobs that are no longer needed: hypergpu job rm JOB",
            ),
        )


def _job_alerts(job: JsonObject, around: Surroundings) -> Iterator[AlertState]:
    name = job["name"] or job["id"]
    if job["phase"] not in ENDED:
        if alert := _stuck_alert(job, name, around):
            yield alert
        if alert := _divergence_alert(job, name):
            yield alert
    yield from _payment_alerts(job, name, around)


def _stuck_alert(job: JsonObject, name: str, around: Surroundings) -> AlertState | None:
    moved_ms = around.moved_at_ms.get(job["id"])
    if moved_ms is None or job["phase"] not in _MOVING:
        return None
    rounds = [each["duration_ms"] or 0 for each in job["rounds_by_number"].values()]
    patience_ms = max(STUCK_AFTER_MS, STUCK_ROUNDS * max(rounds, default=0))
    idle_ms = around.now_ms - moved_ms
    if idle_ms < patience_ms:
        return None
    return _alert(
        "stuck",
        "warning",
        f"{name} is stuck",
        f"nothing has happened for {span(idle_ms / 1000)}: {job['reason']}",
        "look at the nodes of the open round (hypergpu job show), let more join, or lower"
        " round.quorum",
        job=job["id"],
    )


def _divergence_alert(job: JsonObject, name: str) -> AlertState | None:
    rounds = sorted(job["rounds_by_number"].values(), key=lambda each: each["number"])
    losses = [each["loss"] for each in rounds if each["loss"] is not None]
    recent, least = losses[-DIVERGING_ROUNDS:], min(losses, default=0.0)
    is_rising = len(recent) == DIVERGING_ROUNDS and recent == sorted(recent)
    if not is_rising or least <= 0 or recent[-1] < DIVERGING_FACTOR * least:
        return None
    return _alert(
        "diverging",
        "warning",
        f"{name} is diverging",
        f"the training loss rose for {DIVERGING_ROUNDS} rounds, from {score(least)} at best to"
        f" {score(recent[-1])}",
        f"lower the learning rate: hypergpu job set {job['id']} lr=...",
        job=job["id"],
    )


def _payment_alerts(job: JsonObject, name: str, around: Surroundings) -> Iterator[AlertState]:
    payments = job["payments"]
    if not payments:
        return
    if payments["halted"]:
        yield _alert(
            "chain-halted",
            "critical",
            f"Payments of {name} are halted",
            payments["halted"],
            "mend what made the transaction fail, then: hypergpu up --retry-payments",
            job=job["id"],
        )
    ended_ms = job["ended_at_ms"]
    owed_amount = int(payments["worth"]) - int(payments["paid"])
    if ended_ms is not None and owed_amount > 0 and around.now_ms - ended_ms > UNPAID_AFTER_MS:
        yield _alert(
            "unpaid",
            "warning",
            f"{name} owes its nodes pay",
            f"of {payments['worth']} earned, {payments['paid']} were paid"
            f" {span((around.now_ms - ended_ms) / 1000)} after the job's end",
            f"see which epoch waits: hypergpu ledger show {job['id']}",
            job=job["id"],
        )


def _node_alert(node: JsonObject, jobs: JsonObject) -> AlertState | None:
    if node["state"] not in AWAY_STATES:
        return None
    for job in jobs.values():
        if job["phase"] in ENDED or not job["rounds_by_number"]:
            continue
        rounds = job["rounds_by_number"]
        newest = sorted(rounds, key=int)[-STUCK_ROUNDS:]
        if any(node["id"] in rounds[number]["lanes"] for number in newest):
            name = node["name"] or short(node["id"])
            return _alert(
                "node-lost",
                "warning",
                f"{name} is away",
                node["reason"] or "it was not heard of",
                "on that machine: hypergpu doctor, then hypergpu join",
                job=job["id"],
                node=node["id"],
            )
    return None


def _alert(  # noqa: PLR0913 - one parameter for each column
    kind: str,
    severity: Any,
    title: str,
    reason: str,
    fix: str,
    *,
    job: str | None = None,
    node: str | None = None,
) -> AlertState:
    return AlertState(kind, severity, title, reason, fix, job, node, 0)

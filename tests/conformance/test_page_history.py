"""The page's history, in each database that it may be kept in."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from dashboard_api.core.series import SeriesPoint
from dashboard_api.core.state import EventLine
from dashboard_api.core.wall_clock import Anchor
from dashboard_api.shell.history import (
    AuditLine,
    EventSearch,
    HistoryStore,
    JobBatch,
    SeriesSpan,
    history_url,
)
from dashboard_api.shell.session_store import SessionStore
from hypergpu.ids import Digest, TokenId
from hypergpu.wire.credentials import Role, Token
from tests.conformance.journal_stores import DATABASES, postgres_schema

TOKEN = Token(("127.0.0.1:7700",), Digest(""), Role.USER, TokenId("0123456789ab"), "s" * 22)


@pytest.fixture(params=DATABASES)
def history(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[HistoryStore]:
    if request.param == "sqlite":
        store = HistoryStore(history_url("", tmp_path))
        yield store
        store.close()
        return
    with postgres_schema() as url:
        store = HistoryStore(url)
        yield store
        store.close()


def batch(count: int) -> JobBatch:
    events = [
        EventLine(number, 10 * number, "NodeLost", f"Machine_{number} was lost", "0x1", number)
        for number in range(count)
    ]
    points = [SeriesPoint("loss", number, number, float(number)) for number in range(count)]
    return JobBatch(count, events, {0: b"{}", count: b"[]"}, points)


def test_a_batch_that_is_written_again_changes_nothing(history: HistoryStore) -> None:
    for _ in range(2):
        history.write_job("a", batch(40))
    assert history.next_sequence("a") == 40
    assert history.next_sequence("b") == 0
    assert history.rounds("a", 0, 100) == [b"{}", b"[]"]
    buckets = history.series(SeriesSpan("job/a", "loss", 2))
    assert sum(each.count for each in buckets) == 40
    assert max(each.greatest for each in buckets) == 39.0


def test_buckets_grow_with_each_batch(history: HistoryStore) -> None:
    history.write_job("a", batch(20))
    history.write_job("a", batch(300))
    buckets = history.series(SeriesSpan("job/a", "loss", 1))
    assert [(each.least, each.greatest, each.count) for each in buckets] == [(0.0, 299.0, 300)]


def test_events_are_found_by_text_kind_and_place(history: HistoryStore) -> None:
    history.write_job("a", batch(30))
    events = history.events(EventSearch("a", query="machine_2", before=25, limit=3))
    assert [each["sequence"] for each in events] == [24, 23, 22]
    # The wildcards of the database are plain characters here.
    assert history.events(EventSearch("a", query="machine%")) == []
    assert history.events(EventSearch("a", kind="JobEnded")) == []
    assert history.events(EventSearch("b")) == []


def test_clocks_and_actions_are_kept(history: HistoryStore) -> None:
    for anchor in (Anchor(0, 5), Anchor(9, 70)):
        history.add_anchor("a", anchor)
    assert history.anchors("a") == [Anchor(0, 5), Anchor(9, 70)]
    for number in range(3):
        history.add_audit(AuditLine(number, "id", "user", f"POST /{number}", "done"))
    assert [each["action"] for each in history.audit(2)] == ["POST /2", "POST /1"]


def test_sessions_end_at_their_time_and_when_they_are_ended(history: HistoryStore) -> None:
    sessions = SessionStore(history.engine)
    cookie, session = sessions.open_session(TOKEN, 1_000)
    assert sessions.find_session(cookie, 1_000) == session
    assert sessions.find_session(cookie, session.ends_at_ms) is None
    assert sessions.find_session("another", 1_000) is None
    sessions.end_session(cookie)
    assert sessions.find_session(cookie, 1_000) is None


def test_a_series_that_begins_late_keeps_its_detail(history: HistoryStore) -> None:
    late = 176_000_000
    points = [SeriesPoint("rtt_us", late + at, at, float(at)) for at in range(300)]
    history.add_readings({"node/a": points})
    buckets = history.series(SeriesSpan("node/a", "rtt_us", 300))
    assert [each.total for each in buckets] == [float(at) for at in range(300)]

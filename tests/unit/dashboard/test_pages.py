"""Recordings, the page in one file, webhooks, and what the feed's page documents."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from dashboard_api.core.changes import apply_changes
from dashboard_api.core.frames import frame_schema
from dashboard_api.core.page_file import PageParts, page_with_recording
from dashboard_api.core.projection import FeedProjection
from dashboard_api.core.recording import (
    RecordedJob,
    RecordingError,
    bounded_recording,
    decode_recording,
    recorded_frames,
)
from dashboard_api.shell.feed import Feed
from dashboard_api.shell.webhooks import AlertSender, checked_webhooks
from hypergpu.errors import HyperGPUError
from tests.dashboard_journal import JOB, START_MS, journal, nodes_seen, summary

ROOT = Path(__file__).parents[3]
DOCUMENT = ROOT / "docs" / "feed.md"
PAGE_TYPES = ROOT / ".ci" / "page_types.py"


def recorded_job(rounds: int = 6) -> RecordedJob:
    events = [(START_MS + event.at_ms, event) for event in journal(4, rounds=rounds)]
    return RecordedJob("somewhere:7700", summary(phase="finished"), events, nodes_seen(1))


def test_a_recording_ends_in_the_state_that_its_events_give() -> None:
    whole = recorded_job()
    end_ms = whole.events[-1][0]
    (_, first), *others = recorded_frames(whole, end_ms)
    state = first["state"]
    for seq, (_, frame) in enumerate(others, 1):
        assert frame["seq"] == seq
        apply_changes(state, frame["changes"])
    direct = FeedProjection("somewhere:7700")
    direct.take_reachability("", whole.events[0][0], is_reachable=True)
    direct.take_nodes(whole.nodes, end_ms)
    for at_ms, event in whole.events:
        direct.take_event(JOB, event, at_ms)
    direct.take_jobs([whole.job])
    assert state == direct.state


def test_a_recording_is_made_coarser_until_it_fits() -> None:
    whole = recorded_job(rounds=60)
    end_ms = whole.events[-1][0]
    fine = bounded_recording(whole, end_ms, 1 << 30)
    coarse = bounded_recording(whole, end_ms, len(fine) - 1)
    assert len(coarse) < len(fine)
    assert decode_recording(coarse)[0][1]["type"] == "snapshot"


@pytest.mark.parametrize("content", [b"", b"[]", b"{}", b'[[1,{"type":"delta"}]]', b"\xff"])
def test_a_file_that_is_no_recording_is_refused(content: bytes) -> None:
    with pytest.raises(RecordingError):
        decode_recording(content)


def test_nothing_in_a_recording_or_a_part_ends_its_element() -> None:
    hostile = "</script><script>alert(1)</script><!--"
    parts = PageParts("<html><head></head><body></body></html>", hostile, "</style>")
    recording = json.dumps([[1, {"type": "snapshot", "name": hostile}]]).encode()
    page = page_with_recording(parts, recording)
    # An opening within a script's text is text; only an end would end it.
    assert page.count("</script>") == 2
    assert page.count("</style>") == 1
    match = re.search(r'id="recording">(.*?)</script>', page)
    assert match is not None
    assert json.loads(match[1]) == json.loads(recording)


def test_a_page_that_was_not_built_still_holds_the_recording() -> None:
    page = page_with_recording(PageParts(), b"[]")
    assert 'id="recording">[]</script>' in page
    assert "not built" in page


@pytest.mark.parametrize("address", ["ftp://a/b", "file:///etc/passwd", "http://", "nonsense"])
def test_a_webhook_that_is_no_web_address_is_refused(address: str) -> None:
    with pytest.raises(HyperGPUError, match="no http or https"):
        checked_webhooks([address])


async def test_a_webhook_is_told_of_an_alert_when_it_begins_and_when_it_ends() -> None:
    projection = FeedProjection("somewhere:7700")
    sender = AlertSender(Feed(projection), checked_webhooks(["https://example.org/hook"]))
    assert sender.news() == []
    projection.take_alerts({"stuck/a": {"kind": "stuck"}})
    assert sender.news() == [{"event": "began", "id": "stuck/a", "kind": "stuck"}]
    assert sender.news() == []
    projection.take_alerts({})
    assert sender.news() == [{"event": "ended", "id": "stuck/a", "kind": "stuck"}]


def test_the_documented_schema_is_the_one_that_frames_follow() -> None:
    match = re.search(r"```json schema\n(.*?)```", DOCUMENT.read_text("utf-8"), re.DOTALL)
    assert match is not None
    assert json.loads(match[1]) == frame_schema()


def test_the_types_of_the_page_are_those_of_the_state() -> None:
    subprocess.run([sys.executable, PAGE_TYPES, "--check"], cwd=ROOT, check=True)

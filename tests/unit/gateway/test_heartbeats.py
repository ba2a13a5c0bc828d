"""How often idle nodes are to say that they are there, and how long their silence is borne."""

from hypothesis import given
from hypothesis import strategies as st

from coordinator.core.hub.heartbeats import (
    INTERVAL_MS_MAX,
    STREAMS_AT_USUAL,
    WORK_MS,
    StreamPace,
    UsualPace,
    heartbeat_pace,
)
from hypergpu.units import Milliseconds

USUAL = UsualPace(interval_ms=5_000, lost_after_ms=15_000)


def at(ms: int) -> Milliseconds:
    return Milliseconds(ms)


def test_heartbeats_come_as_often_as_usual_up_to_a_thousand_streams() -> None:
    assert heartbeat_pace(STREAMS_AT_USUAL, USUAL)[:2] == USUAL


def test_more_streams_have_longer_intervals_and_longer_silences_up_to_half_a_minute() -> None:
    paces = [heartbeat_pace(streams, USUAL)[:2] for streams in (2_000, 5_000, 6_000, 50_000)]
    assert paces == [(10_000, 30_000), (25_000, 75_000), (30_000, 90_000), (30_000, 90_000)]


def test_the_reason_names_the_interval_and_the_streams() -> None:
    assert heartbeat_pace(2_500, USUAL).reason == "every 12.5 s: 2500 streams of 1000"


def test_an_interval_of_the_settings_that_is_longer_than_all_stays() -> None:
    slow = UsualPace(interval_ms=60_000, lost_after_ms=180_000)
    assert heartbeat_pace(9_000, slow)[:2] == slow


def test_a_node_is_told_again_once_its_interval_is_a_quarter_off() -> None:
    pace = StreamPace.begin(USUAL).with_streams(4_000)
    outdated_counts = [
        streams for streams in (3_001, 3_000, 4_999, 5_000) if pace.is_outdated(streams)
    ]
    assert outdated_counts == [3_000, 5_000]


def test_the_silence_of_a_node_at_work_is_borne_no_longer_than_usual() -> None:
    idle = StreamPace.begin(USUAL).with_streams(5_000)
    busy_pace = idle.after_work(at(100_000))
    assert idle.silence_limit_ms(at(100_001)) == 75_000
    assert busy_pace.silence_limit_ms(at(100_001)) == 15_000
    assert busy_pace.silence_limit_ms(at(100_000 + WORK_MS)) == 75_000


@given(st.integers(0, 100_000), st.integers(10, 120_000), st.integers(100, 360_000))
def test_a_node_may_miss_as_many_heartbeats_as_by_the_settings(
    streams: int, interval_ms: int, lost_after_ms: int
) -> None:
    usual = UsualPace(interval_ms, lost_after_ms)
    pace = heartbeat_pace(streams, usual)
    assert usual.interval_ms <= pace.interval_ms <= max(interval_ms, INTERVAL_MS_MAX)
    missed_heartbeats = pace.lost_after_ms / pace.interval_ms
    assert abs(missed_heartbeats - lost_after_ms / interval_ms) * pace.interval_ms < 1

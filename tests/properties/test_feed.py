"""The feed: however its deltas are cut, and wherever a client comes in, the state is the same."""

import json
from collections.abc import Callable, Iterator
from random import Random
from typing import Any

import jsonschema
import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dashboard_api.core.changes import apply_changes, conflated_changes, json_copy
from dashboard_api.core.frames import delta_frame, frame_schema, snapshot_frame
from dashboard_api.core.outbox import ClientQueue, DeltaRing, Pacer, Wanted
from dashboard_api.core.projection import FeedProjection
from dashboard_api.core.state import FeedState
from tests.dashboard_journal import JOB, START_MS, journal, levels_seen, nodes_seen, summary

Step = Callable[[FeedProjection], None]
SEEDS = st.integers(0, 2**32)


def steps(seed: int) -> Iterator[Step]:
    """What a coordinator tells, events and levels mixed."""
    rng = Random(seed)
    yield lambda feed: feed.take_jobs([summary()])
    for event in journal(seed, rounds=3):
        at_ms = START_MS + event.at_ms
        yield lambda feed, event=event, at_ms=at_ms: feed.take_event(JOB, event, at_ms)  # type: ignore[misc]
        chance, more = rng.random(), rng.randrange(2**32)
        if chance < 0.3:
            yield lambda feed, more=more, at_ms=at_ms: feed.take_levels(  # type: ignore[misc]
                levels_seen(more), at_ms
            )
        elif chance < 0.5:
            yield lambda feed, more=more, at_ms=at_ms: feed.take_nodes(nodes_seen(more), at_ms)  # type: ignore[misc]
        elif chance < 0.6:
            yield lambda feed: feed.take_jobs([summary()])
    if rng.random() < 0.2:
        yield lambda feed: feed.take_jobs([])


@given(SEEDS)
@settings(max_examples=60)
def test_any_split_of_deltas_after_a_snapshot_gives_the_same_state(seed: int) -> None:
    projection = FeedProjection("somewhere:7700")
    rng = Random(seed)
    client: dict[str, Any] | None = None
    for step in steps(seed):
        step(projection)
        if rng.random() < 0.4:
            changes = json.loads(json.dumps(conflated_changes(projection.take_changes())))
            if client is not None:
                apply_changes(client, changes)
                assert client == projection.state
            elif rng.random() < 0.3:
                client = json_copy(projection.state)
    changes = conflated_changes(projection.take_changes())
    if client is not None:
        apply_changes(client, changes)
        assert client == projection.state


@given(SEEDS, st.floats(0, 1))
@settings(max_examples=40)
def test_a_client_that_returns_at_any_number_has_the_same_state(seed: int, part: float) -> None:
    projection, ring = FeedProjection("somewhere:7700"), DeltaRing()
    states = [json_copy(projection.state)]
    projection.take_changes()
    for step in steps(seed):
        step(projection)
        if changes := conflated_changes(projection.take_changes()):
            ring.add(delta_frame(ring.seq + 1, START_MS, changes))
            states.append(json_copy(projection.state))
    seq = round(part * ring.seq)
    client = states[seq]
    missed_frames = ring.after(seq)
    assert missed_frames is not None
    for number, frame in enumerate(missed_frames, seq + 1):
        delta = json.loads(frame)
        assert delta["seq"] == number
        apply_changes(client, delta["changes"])
    assert client == projection.state


@given(SEEDS)
@settings(max_examples=25)
def test_every_frame_is_of_the_schema(seed: int) -> None:
    validator = jsonschema.Draft202012Validator(frame_schema())
    projection = FeedProjection("somewhere:7700")
    projection.take_changes()
    for step in steps(seed):
        step(projection)
        if changes := projection.take_changes():
            validator.validate(json.loads(delta_frame(1, START_MS, changes)))
    validator.validate(json.loads(snapshot_frame(1, START_MS, projection.state)))
    msgspec.convert(projection.state, FeedState, strict=True)


@given(SEEDS)
@settings(max_examples=20)
def test_events_that_are_told_twice_change_nothing(seed: int) -> None:
    once, twice = FeedProjection("somewhere:7700"), FeedProjection("somewhere:7700")
    for event in journal(seed):
        once.take_event(JOB, event, START_MS + event.at_ms)
        twice.take_event(JOB, event, START_MS + event.at_ms)
        twice.take_event(JOB, event, START_MS + event.at_ms)
    assert once.state == twice.state


@given(st.lists(st.integers(1, 400), max_size=60), st.integers(100, 2_000))
def test_the_ring_gives_all_or_nothing(sizes: list[int], bytes_max: int) -> None:
    ring = DeltaRing(bytes_max)
    frames = [bytes([number % 256]) * size for number, size in enumerate(sizes)]
    for frame in frames:
        ring.add(frame)
    for seq in range(-1, len(frames) + 2):
        missed_frames = ring.after(seq)
        assert missed_frames is None or missed_frames == frames[seq:]
    assert ring.after(len(frames)) == []


@given(st.lists(st.one_of(st.integers(1, 300), st.none()), max_size=80))
def test_a_queue_stays_within_its_bound_and_skips_nothing_but_by_a_snapshot(
    script: list[int | None],
) -> None:
    """None: the client takes a frame."""
    queue, sent_number, newest = ClientQueue(bytes_max=600), -1, -1
    queue.begin(None)
    queue.note_snapshot()
    for size in script:
        if size is not None:
            newest += 1
            queue.offer(newest.to_bytes(2, "big") * size)
        elif (frame := queue.take()) is Wanted.SNAPSHOT:
            queue.note_snapshot()
            sent_number = newest
        elif isinstance(frame, bytes):
            assert int.from_bytes(frame[:2], "big") == sent_number + 1
            sent_number += 1
        assert queue.bytes_waiting <= 600


@given(st.lists(st.integers(0, 120), min_size=1, max_size=100))
def test_the_first_change_after_silence_leaves_at_once_and_never_over_twenty_a_second(
    gaps_ms: list[int],
) -> None:
    pacer, now_ms, send_times_ms = Pacer(), 0, list[int]()
    for gap_ms in gaps_ms:
        now_ms += gap_ms
        wait_ms = pacer.wait_ms(now_ms)
        assert (wait_ms == 0) == (not send_times_ms or now_ms - send_times_ms[-1] >= 50)
        if wait_ms == 0:
            pacer.note_delta(now_ms)
            send_times_ms.append(now_ms)
    for begin in send_times_ms:
        assert sum(begin <= at_ms < begin + 1000 for at_ms in send_times_ms) <= 20


def test_a_change_of_an_unknown_kind_is_refused() -> None:
    with pytest.raises(ValueError, match="unknown kind"):
        apply_changes({}, [["turn", ["a"], 1]])

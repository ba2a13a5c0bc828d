"""Recorded frames: ``[[at_ms, frame], ...]``, first a snapshot."""

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from dashboard_api.core.changes import conflated_changes
from dashboard_api.core.projection import FeedProjection
from dashboard_api.core.state import PaymentsState
from hypergpu.user.client.values import JobEvent, JobView, NodeView

STEPS_TRIED = (1_500, 500, 150, 50)

RecordedFrame = tuple[int, dict[str, Any]]


class RecordedJob(msgspec.Struct, frozen=True):
    """What a recording is made of."""

    address: str
    job: JobView
    events: Sequence[tuple[int, JobEvent]]
    """With the wall-clock time, ascending."""
    nodes: Sequence[NodeView] = ()
    payments: PaymentsState | None = None
    """Accounts when the recording was made; None: the job pays nothing."""
    decimals: int = 0
    """Decimals of the token that the job pays in."""


class RecordingError(ValueError):
    """A file holds no recording."""


def bounded_recording(recorded: RecordedJob, end_ms: int, bytes_most: int) -> bytes:
    """A job's whole course as a file, with the most steps that the size allows.

    Args:
        recorded: The job.
        end_ms: When the recording ends, Unix time.
        bytes_most: Wanted size; a recording of the fewest steps may exceed it.
    """
    content = b""
    for steps in STEPS_TRIED:
        content = encode_recording(recorded_frames(recorded, end_ms, steps))
        if len(content) <= bytes_most:
            break
    return content


def recorded_frames(
    recorded: RecordedJob, end_ms: int, steps: int = STEPS_TRIED[0]
) -> list[RecordedFrame]:
    """A job's whole course as frames.

    Args:
        recorded: The job.
        end_ms: When the recording ends, Unix time.
        steps: Deltas of equal distance in time: further ones are joined with their neighbours.
    """
    projection = FeedProjection(recorded.address)
    start_ms = recorded.events[0][0] if recorded.events else end_ms
    projection.take_reachability("", start_ms, is_reachable=True)
    if recorded.nodes:
        projection.take_nodes(recorded.nodes, end_ms)
    projection.take_changes()
    first = msgspec.json.decode(msgspec.json.encode(projection.state))
    frames: list[RecordedFrame] = [
        (start_ms, {"type": "snapshot", "seq": 0, "at_ms": start_ms, "state": first})
    ]
    gap_ms = max(50, (end_ms - start_ms) // steps)
    due_ms = start_ms
    for at_ms, event in recorded.events:
        if at_ms >= due_ms + gap_ms:
            _add_delta(frames, projection, due_ms)
            due_ms = at_ms
        projection.take_event(recorded.job.id, event, at_ms)
    _add_delta(frames, projection, due_ms)
    projection.take_jobs([recorded.job])
    if recorded.payments is not None:
        projection.take_payments(recorded.job.id, recorded.payments, recorded.decimals)
    _add_delta(frames, projection, max(end_ms, due_ms))
    return frames


def _add_delta(frames: list[RecordedFrame], projection: FeedProjection, at_ms: int) -> None:
    if changes := conflated_changes(projection.take_changes()):
        seq = len(frames)
        frame = {"type": "delta", "seq": seq, "at_ms": at_ms, "changes": changes}
        frames.append((at_ms, frame))


def encode_recording(frames: Iterable[RecordedFrame]) -> bytes:
    """A recording as a file."""
    return msgspec.json.encode([[at_ms, frame] for at_ms, frame in frames])


def decode_recording(content: bytes) -> list[RecordedFrame]:
    """A recording from a file.

    Raises:
        RecordingError: It is no recording.
    """
    try:
        frames = msgspec.json.decode(content, type=list[tuple[int, dict[str, Any]]])
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as wrong:
        raise RecordingError(f"it is no list of [at_ms, frame]: {wrong}") from wrong
    if not frames or frames[0][1].get("type") != "snapshot":
        raise RecordingError("its first frame is no snapshot")
    return frames

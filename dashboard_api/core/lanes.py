"""Lanes of a round: the plan's part for a node and the phases of its work, each with its time.

A node reports with its update how long its phases took: they are laid out backwards from when the
update was in, and what was seen live stays before them. Of a node that reports nothing the borders
are estimates: from progress that was seen, else from the computing time that the update states.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from dashboard_api.core.changes import JsonObject
from hypergpu.jobfile.spec import RoundRule
from hypergpu.journal.events import JournalledUpdate, NodePart
from hypergpu.journal.text import round_from_one

PHASES = ("download", "train", "encode", "wait", "upload")
"""In the order of the work."""


def planned_lane(slot: int, part: NodePart, batch: int, at_ms: int) -> JsonObject:
    """Lane of a participant at the opening of its round.

    Args:
        slot: The node's number in the job.
        part: The node's entry in the plan, or its progress where nothing was planned.
        batch: The job's batch size, for a part that states none.
        at_ms: When the round was opened, Unix time.
    """
    forecast_ms = part.forecast_ms or None
    return {
        "slot": slot,
        "reason": round_from_one(part.reason),
        "inner_steps": part.inner_steps,
        "batch": part.batch_size or batch,
        "codec": part.codec,
        "forecast_ms": forecast_ms,
        "forecast_spread_ms": part.spread_ms if forecast_ms else None,
        "segments": [segment("download", at_ms, None)],
        "is_estimate": True,
        "result": "pending",
        "result_reason": "",
        "loss": None,
        "update_bytes": 0,
        "quality_bps": None,
    }


def resting_lane(slot: int, reason: str, at_ms: int) -> JsonObject:
    """Lane of a node that the plan gave nothing."""
    lane = planned_lane(slot, NodePart(reason=reason), 0, at_ms)
    rest = [segment("rest", at_ms, None)]
    return lane | {"segments": rest, "result": "resting", "result_reason": round_from_one(reason)}


def lanes_quorum(lanes: Mapping[str, Any], spec: Mapping[str, Any] | None) -> int:
    """Quorum by the lanes of a round whose journal does not tell it, or not yet; 0: not known."""
    share = ((spec or {}).get("round") or {}).get("quorum")
    working_nodes = sum(1 for lane in lanes.values() if lane["result"] != "resting")
    return RoundRule(quorum=float(share)).updates_needed(working_nodes) if share else 0


def segment(phase: str, start_ms: int, end_ms: int | None) -> JsonObject:
    """A phase of a lane; without an end it goes on."""
    return {"phase": phase, "start_ms": start_ms, "end_ms": end_ms}


def closed_segments(segments: Sequence[JsonObject], at_ms: int) -> list[JsonObject]:
    """The segments with an end of the one that goes on."""
    return [
        each if each["end_ms"] is not None else {**each, "end_ms": max(at_ms, each["start_ms"])}
        for each in segments
    ]


def continued_segments(segments: Sequence[JsonObject], phase: str, at_ms: int) -> list[JsonObject]:
    """The segments with a further phase from now on; the same where that phase goes on."""
    if segments and segments[-1]["phase"] == phase and segments[-1]["end_ms"] is None:
        return list(segments)
    return [*closed_segments(segments, at_ms), segment(phase, at_ms, None)]


def received_segments(
    segments: Sequence[JsonObject], update: JournalledUpdate, at_ms: int
) -> tuple[list[JsonObject], bool]:
    """Segments of a lane whose update has come in, and whether their borders are estimates.

    Args:
        segments: The lane's so far; the first one begins with the assignment.
        update: The accepted update, as journalled.
        at_ms: When it came in, Unix time.
    """
    start_ms = segments[0]["start_ms"] if segments else at_ms
    rest = segment("pause" if is_paused(segments) else "wait", at_ms, None)
    durations = {} if update.phases is None else msgspec.structs.asdict(update.phases)
    if any(durations.values()):
        pauses = [each["end_ms"] for each in segments if each["phase"] == "pause"]
        from_ms = max([start_ms, *(end_ms for end_ms in pauses if end_ms is not None)])
        exact = exact_segments(durations, from_ms, at_ms)
        earlier_segments = segments_until(segments, exact[0]["start_ms"] if exact else at_ms)
        if earlier_segments and exact and earlier_segments[-1]["phase"] == exact[0]["phase"]:
            # The assignment was on its way first.
            exact[0]["start_ms"] = earlier_segments.pop()["start_ms"]
        return [*earlier_segments, *exact, rest], False
    if len(segments) > 1:
        return [*closed_segments(segments, at_ms), rest], True
    compute_ms = min(update.compute_ms, at_ms - start_ms)
    # Nothing tells the way down from the way up: each gets half of what is not computing.
    train_ms = start_ms + (at_ms - start_ms - compute_ms) // 2
    guessed_segments = [
        segment("download", start_ms, train_ms),
        segment("train", train_ms, train_ms + compute_ms),
        segment("upload", train_ms + compute_ms, at_ms),
        rest,
    ]
    return guessed_segments, True


def exact_segments(durations: Mapping[str, int], from_ms: int, end_ms: int) -> list[JsonObject]:
    """Segments of reported durations up to ``end_ms``; what lies before ``from_ms`` is cut."""
    segments: list[JsonObject] = []
    for phase in reversed(PHASES):
        start_ms = max(from_ms, end_ms - durations.get(f"{phase}_ms", 0))
        if start_ms < end_ms:
            segments.insert(0, segment(phase, start_ms, end_ms))
            end_ms = start_ms
    return segments


def segments_until(segments: Sequence[JsonObject], end_ms: int) -> list[JsonObject]:
    """The parts of segments before a time."""
    return [
        {**each, "end_ms": min(end_ms, end_ms if each["end_ms"] is None else each["end_ms"])}
        for each in segments
        if each["start_ms"] < end_ms
    ]


def is_paused(segments: Sequence[JsonObject]) -> bool:
    """Whether the job is paused at the end of a lane."""
    return bool(segments) and segments[-1]["phase"] == "pause" and segments[-1]["end_ms"] is None


def live_phase(steps_done: int, steps_total: int) -> str:
    """Phase of a participant whose update is awaited, by its progress."""
    if steps_done <= 0:
        return "download"
    return "train" if steps_done < steps_total else "upload"

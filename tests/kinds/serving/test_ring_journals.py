"""Journals of rings of before there were layer-tokens."""

from pathlib import Path
from typing import Any

import msgspec

from coordinator.core.serving.events import ServeEvent, WindowAccepted, WindowRefused
from coordinator.core.serving.kind import SERVING
from coordinator.core.serving.state import ServeJob
from coordinator.core.work.work_commands import WriteRecord
from coordinator.core.work.work_events import JobEnded

VECTOR = Path(__file__).parents[2] / "vectors" / "journals" / "ring-tokens.json"
RECORDS = WindowAccepted | WindowRefused | JobEnded


class RingJournal(msgspec.Struct, frozen=True):
    """What a coordinator of before left."""

    rows: list[tuple[str, dict[str, Any]]]
    state: ServeJob
    """After all of them."""


def test_a_ring_of_before_replays_to_the_same_counts_in_tokens() -> None:
    journal = msgspec.json.decode(VECTOR.read_bytes(), type=RingJournal)
    events = [msgspec.convert(body, ServeEvent) for _, body in journal.rows]
    job, records = None, []
    for event in events:
        if isinstance(event, RECORDS):
            continue
        step = SERVING.transition(job, event)
        job = step.job
        records += [each.record for each in step.commands if isinstance(each, WriteRecord)]
    assert job == journal.state
    assert records == [event for event in events if isinstance(event, RECORDS)]
    assert job.terms.unit.value == "tokens"
    assert job.paid_units == 10 + 5 + 15 + 7

"""Whether a node stands by for a ring with its stage in memory: by the journal, and by its log."""

import json
from collections.abc import Callable
from pathlib import Path

from hypergpu.journal.serving_events import RingPlacedEvent, StageMovedEvent, StandbyPlacedEvent
from hypergpu.user.client import Coordinator


def stands_by(client: Coordinator, job: str, log_of: Callable[[str], Path]) -> bool:
    """Whether the node that is to stand by now says that its stage is in memory.

    Args:
        client: Reads the journal.
        job: The served model's.
        log_of: Gives the log of a node by its id.
    """
    standby = ""
    for event in client.read_events(job).until_newest():
        if isinstance(event.content, StandbyPlacedEvent):
            standby = event.content.node
        elif isinstance(event.content, StageMovedEvent | RingPlacedEvent):
            standby = ""
    if not standby:
        return False
    text = log_of(standby).read_text()
    lines = [json.loads(line) for line in text.splitlines() if line[:1] == "{"]
    leases = [
        line["lease"]
        for line in lines
        if line["event"] == "WorkAssigned" and line["reason"].startswith("stands by")
    ]
    return bool(leases) and any(line["event"].startswith(f"lease {leases[-1]}: ") for line in lines)

"""Instants that the programs of a demo logged. Who watches a job learns of an accepted update some
seconds late, where the coordinator has to be found first.
"""

from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

import msgspec

from hypergpu.units import Milliseconds


class LogLine(msgspec.Struct, frozen=True):
    """A line of a program's log."""

    event: str
    timestamp: datetime


def logged_ms(logs: Path, pattern: str, event: str) -> list[Milliseconds]:
    """When programs logged an event, in ms since 1970, in order.

    Args:
        logs: Folder of the logs.
        pattern: Names of the programs' logs, such as ``node-*.log``.
        event: Its name.
    """
    lines = (line for path in logs.glob(pattern) for line in _lines(path))
    times_s = [line.timestamp.timestamp() for line in lines if line.event == event]
    return sorted(Milliseconds(round(1000 * each)) for each in times_s)


def _lines(path: Path) -> Iterator[LogLine]:
    for text in path.read_bytes().splitlines():
        try:
            yield msgspec.json.decode(text, type=LogLine)
        except (msgspec.DecodeError, msgspec.ValidationError):
            # What libraries say, such as Ray, and a line that is being written.
            continue

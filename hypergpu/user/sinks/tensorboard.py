"""Event files that TensorBoard shows: a folder of each job."""

import re
from collections.abc import Iterator
from pathlib import Path

from tensorboard.backend.event_processing.event_file_loader import RawEventFileLoader
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from hypergpu.user.client.values import JobDetail, JobView
from hypergpu.user.sinks.records import SinkRecord

_SEQUENCE_TAG = "job/event"
"""Number of the journal's event that the scalars beside it come from."""


class TensorboardSink:
    """Scalars by rounds. Implements `Sink`.

    The scalars of an event are one record of the file, which has a checksum: a kill leaves all of
    them or none.
    """

    def __init__(self, folder: str) -> None:
        self._root = Path(folder).expanduser()
        self._folder = self._root
        self._writer: EventFileWriter | None = None

    def open(self, job: JobDetail) -> int:
        """See `Sink`."""
        # A stranger's job may be named like a path.
        name = re.sub(r"[^A-Za-z0-9_.-]", "-", f"{job.job.name}-{job.job.id}")
        self._folder = self._root / name.lstrip(".-")
        return max(_sequences(self._folder), default=-1) + 1

    def record(self, record: SinkRecord) -> None:
        """See `Sink`."""
        if self._writer is None:  # a watch with nothing new leaves no empty file
            self._writer = EventFileWriter(str(self._folder))
        scalars = {**record.named_values(), _SEQUENCE_TAG: float(record.sequence)}
        values = [Summary.Value(tag=tag, simple_value=each) for tag, each in scalars.items()]
        event = Event(
            wall_time=record.at_ms / 1000, step=record.round, summary=Summary(value=values)
        )
        self._writer.add_event(event)
        self._writer.flush()

    def close(self, job: JobView) -> None:
        """See `Sink`."""
        if self._writer is not None:
            self._writer.close()


def _sequences(folder: Path) -> Iterator[int]:
    """Numbers of the events that are written in a folder."""
    for path in folder.glob("events.out.tfevents.*"):
        for event_bytes in RawEventFileLoader(str(path)).Load():
            for value in Event.FromString(event_bytes).summary.value:
                if value.tag == _SEQUENCE_TAG:
                    yield int(value.simple_value)

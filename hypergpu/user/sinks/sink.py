"""`Sink`, three methods that programs for curves are reached by, and a watched job that feeds them.

A sink says itself how far it has got, so that a second watch of a job goes on behind that.
"""

import contextlib
import importlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol, runtime_checkable

from hypergpu.errors import HyperGPUError, Reason, missing_extra
from hypergpu.user.client.values import JobDetail, JobEvent, JobView
from hypergpu.user.sinks.records import JobFigures, SinkRecord
from hypergpu.user.terminal.watch import JobProgress, WatchView


@runtime_checkable
class Sink(Protocol):
    """A place that the figures of one job are written to."""

    def open(self, job: JobDetail) -> int:
        """Begin with a job, or go on with it.

        Returns:
            Sequence number of the first event that is not written there yet.
        """

    def record(self, record: SinkRecord) -> None:
        """Write figures. They come in the order of their sequence numbers, each once."""

    def close(self, job: JobView) -> None:
        """End. The job may go on, when it was watched no longer: its phase says so."""


_KINDS = {
    "mlflow": "hypergpu.user.sinks.mlflow:MlflowSink",
    "tensorboard": "hypergpu.user.sinks.tensorboard:TensorboardSink",
    "wandb": "hypergpu.user.sinks.wandb:WandbSink",
}
_FORMS = "tensorboard:FOLDER, wandb:PROJECT or mlflow:URI"


def named_sink(text: str) -> Sink:
    """The sink that a text such as ``tensorboard:runs`` names.

    Raises:
        HyperGPUError: It names none, or its library is not installed.
    """
    kind, _, target = text.partition(":")
    if kind not in _KINDS or not target:
        detail = f"{text[:80]!r} names no place for figures"
        raise HyperGPUError(Reason.ARGUMENT_INVALID, detail, fix=f"give {_FORMS}")
    module, _, name = _KINDS[kind].partition(":")
    library(kind)
    make: Callable[[str], Sink] = getattr(importlib.import_module(module), name)
    return make(target)


def library(name: str) -> Any:
    """Import a library of a sink.

    Raises:
        HyperGPUError: It is not installed.
    """
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if (extra_error := missing_extra(error)) is None:
            raise
        raise extra_error from error


def named_sinks(given: Sequence[Sink | str]) -> list[Sink]:
    """Sinks, some of which are named by a text."""
    return [named_sink(each) if isinstance(each, str) else each for each in given]


class SinkView(WatchView):
    """Shows a job and writes its figures to sinks."""

    def __init__(self, view: WatchView, job: JobDetail, sinks: Sequence[Sink]) -> None:
        self._view = view
        self._figures = JobFigures(job)
        self._sinks = [(sink, sink.open(job)) for sink in sinks]
        self._job = job.job

    def event(self, event: JobEvent, progress: JobProgress) -> None:
        """Write its figures where they are not yet, and show it."""
        if (record := self._figures.read(event)) is not None:
            for sink, first in self._sinks:
                if record.sequence >= first:
                    sink.record(record)
        self._view.event(event, progress)

    def refresh(self, progress: JobProgress) -> None:
        """Show the newest figures."""
        self._job = progress.job or self._job
        self._view.refresh(progress)

    def say(self, text: str) -> None:
        """Show a line that is in no journal."""
        self._view.say(text)

    def close(self) -> None:
        """End all sinks."""
        with contextlib.ExitStack() as stack:
            for sink, _ in self._sinks:
                stack.callback(sink.close, self._job)


@contextlib.contextmanager
def with_sinks(view: WatchView, job: JobDetail, sinks: Sequence[Sink]) -> Iterator[WatchView]:
    """A view of a job that also writes its figures to sinks; it must be shown from its start."""
    both = SinkView(view, job, sinks)
    try:
        yield both
    finally:
        both.close()

"""Where a watched job is shown: JSON lines, plain lines or a live screen."""

import contextlib
from collections.abc import Iterator

from hypergpu.client.values import JobEvent
from hypergpu.terminal.figures import score
from hypergpu.terminal.output import is_rich, say, say_json_line
from hypergpu.terminal.progress import JobProgress, event_note
from hypergpu.terminal.screen import headline, planned_rounds, round_text, screen
from hypergpu.units import several


class WatchView:
    """Shows one job; this one shows nothing."""

    def event(self, event: JobEvent, progress: JobProgress) -> None:
        """Show an event; ``progress`` has it already."""

    def refresh(self, progress: JobProgress) -> None:
        """Show the newest figures, a few times a second."""

    def say(self, text: str) -> None:
        """Show a line that is in no journal; ``progress`` has it as a note already."""


class JsonView(WatchView):
    """One line of JSON an event."""

    def event(self, event: JobEvent, progress: JobProgress) -> None:
        """Print it as journalled."""
        say_json_line(event)


class PlainView(WatchView):
    """A line for each round and for what happens to nodes."""

    def __init__(self) -> None:
        self._phase = ""

    def event(self, event: JobEvent, progress: JobProgress) -> None:
        """Print the event if it is worth a line."""
        if event.kind == "RoundRecorded" and progress.history.rounds:
            say(round_text(progress.history.rounds[-1], planned_rounds(progress)))
        elif event.kind == "EvaluationReady":
            say(evaluation_text(event))
        elif event.kind == "RoundPlanned":
            for line in progress.plan_news:
                say(f"  {line}")
        elif text := event_note(event):
            say(f"  {text}")

    def say(self, text: str) -> None:
        """Print the line."""
        say(f"  {text}")

    def refresh(self, progress: JobProgress) -> None:
        """Print the job's phase whenever it changes."""
        job = progress.job
        phase = job.phase if job else ""
        # A round's own line says that it is being aggregated, the command's error that it failed.
        if phase not in (self._phase, "aggregating", "failed"):
            self._phase = phase
            say(headline(progress))


def evaluation_text(event: JobEvent) -> str:
    """An evaluation in one plain line."""
    fields = event.body
    name = fields.get("metric_name") or "metric"
    metric, loss = (score(_number(fields.get(key))) for key in ("metric", "loss"))
    rounds = several(int(_number(fields.get("round")) or 0), "round")
    return f"  after {rounds}: {name} {metric}, held-out loss {loss}"


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) else None


class LiveView(WatchView):
    """The whole screen, redrawn in place."""

    def __init__(self, title: str = "") -> None:
        from rich.console import Console
        from rich.live import Live

        self._title = title
        self._console = Console(highlight=False)
        self._live = Live(console=self._console, refresh_per_second=4)

    def __enter__(self) -> "LiveView":
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def refresh(self, progress: JobProgress) -> None:
        """Draw."""
        self._live.update(screen(progress, self._console.width, title=self._title))


@contextlib.contextmanager
def open_view(*, as_json: bool = False, title: str = "") -> Iterator[WatchView]:
    """The view that fits where stdout goes."""
    if as_json:
        yield JsonView()
    elif is_rich():
        with LiveView(title) as live:
            yield live
    else:
        yield PlainView()

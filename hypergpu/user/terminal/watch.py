"""A watched job: its state as a fold of its events, and how it is shown, live or in lines, to
its end.
"""

import contextlib
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Self

import msgspec
from msgspec.structs import replace

from hypergpu.errors import HyperGPUError
from hypergpu.journal.events import (
    EvaluationReadyEvent,
    JournalledPlan,
    RoundPlannedEvent,
    RoundRecordedEvent,
)
from hypergpu.journal.sentences import evaluation_text, live_note, plan_changes
from hypergpu.journal.text import metrics_text, round_from_one, score
from hypergpu.user.client.blocking import Coordinator
from hypergpu.user.client.connection import RESTARTING
from hypergpu.user.client.forecasts import JobForecastView
from hypergpu.user.client.history import History, RoundPoint, metric_after, with_event_recorded
from hypergpu.user.client.values import ENDED, JobEvent, JobView, ParticipantView
from hypergpu.user.terminal.forecast import left_text
from hypergpu.user.terminal.output import (
    Column,
    Table,
    bar,
    is_rich,
    name_or_id,
    numbers,
    optional_numbers,
    say,
    say_json_line,
    size,
    span,
    table_lines,
)

if TYPE_CHECKING:
    from rich.console import Group


NOTES_KEPT = 1000


class JobProgress(msgspec.Struct, frozen=True):
    """What a watcher knows."""

    job: JobView | None = None
    participants: tuple[ParticipantView, ...] = ()
    history: History = History()
    notes: tuple[str, ...] = ()
    """What happened to nodes and the job, in people's words; newest last."""
    next_sequence: int = 0
    plan: JournalledPlan | None = None
    """The newest round's, where rounds are planned."""
    plan_news: tuple[str, ...] = ()
    """What it changed, a line a node."""
    names: dict[str, str] = {}
    """What owners call the machines, by node."""
    forecast: JobForecastView | None = None
    """Forecast of the rest, as it was told last; None: it was not."""


def with_job(
    progress: JobProgress, job: JobView, participants: tuple[ParticipantView, ...]
) -> JobProgress:
    """Add the newest summary, asked for beside the stream."""
    return with_participants(replace(progress, job=job), participants)


def with_note(progress: JobProgress, text: str) -> JobProgress:
    """Add a line that the journal does not tell."""
    return replace(progress, notes=(*progress.notes, text)[-NOTES_KEPT:])


def with_participants(
    progress: JobProgress, participants: tuple[ParticipantView, ...]
) -> JobProgress:
    """Add conflated progress of the open round; between rounds the last one's stays."""
    if not participants:
        return progress
    new_names = {each.node: each.name for each in participants if each.name}
    return replace(progress, participants=participants, names=progress.names | new_names)


def with_event(progress: JobProgress, event: JobEvent) -> JobProgress:
    """Add one journalled event."""
    content = event.content
    if isinstance(content, RoundPlannedEvent):
        plan = content.plan
        news = tuple(plan_changes(plan, progress.plan, progress.names))
        progress = replace(progress, plan=plan, plan_news=news)
    if content and (text := live_note(content, progress.names)):
        progress = with_note(progress, text)
    history = with_event_recorded(progress.history, event)
    return replace(progress, history=history, next_sequence=event.sequence + 1)


ROUNDS_SHOWN = 8
NOTES_SHOWN = 4
_ROUND_COLUMNS = (
    *numbers("round", "updates", "loss", "metric"),
    *optional_numbers("samples/s", "up", "down"),
    *numbers("took"),
)
_NODE_COLUMNS = (
    Column("node"),
    Column("state"),
    Column("inner steps"),
    *optional_numbers("loss", "slot"),
    Column("plan", folds=True),
)


def planned_rounds(progress: JobProgress) -> int:
    """How many rounds there will be; 0: the plans decide."""
    return progress.job.rounds if progress.job and progress.plan is None else 0


def round_text(point: RoundPoint, rounds: int) -> str:
    """A closed round in one plain line; of 0 rounds the total is left out."""
    total = f"/{rounds}" if rounds else ""
    return (
        f"round {point.number}{total}  loss {score(point.loss)}"
        f"  {point.updates} of {point.participants} updates"
        f"  {size(point.bytes_up)} up  {size(point.bytes_down or 0)} down"
        f"  {span(point.duration_ms / 1000)}"
    )


def headline(progress: JobProgress) -> str:
    """Where the job is, in one line."""
    job = progress.job
    if job is None:
        return "waiting for the coordinator"
    name = f" {job.name}" if job.name else ""
    return f"{job.id}{name}  {job.phase}: {round_from_one(job.reason)}"


def screen(progress: JobProgress, width: int, *, title: str = "") -> "Group":
    """The whole live view for a terminal of that width."""
    from rich.console import Group
    from rich.text import Text

    lines = [(title, "bold")] if title else []
    lines.append((headline(progress), ""))
    if progress.job is not None:
        lines.append((_figures(progress), "cyan"))
    for columns, rows in (_nodes_table(progress), (_ROUND_COLUMNS, _round_rows(progress))):
        if rows:
            lines.append(("", ""))
            lines += [(line, "") for line in table_lines(columns, rows, width)]
    lines.append(("", ""))
    lines += [(f"  {text}", "yellow") for text in progress.notes[-NOTES_SHOWN:]]
    return Group(*(Text(line, style, overflow="ellipsis", no_wrap=True) for line, style in lines))


def _figures(progress: JobProgress) -> str:
    job = progress.job
    if job is None:
        return ""
    metric = metrics_text(job.metric_name, job.metric, job.metrics)
    rounds = planned_rounds(progress)
    remainder = f"   {left_text(progress.forecast)}" if progress.forecast else ""
    progress_text = f"{bar(job.round, rounds, 30)} round {job.round}/{rounds}"
    return (
        f"{progress_text if rounds else f'round {job.round}, {job.samples} samples'}"
        f"   held out: loss {score(job.loss)}, {metric}"
        f"   {size(job.bytes_up)} up, {size(job.bytes_down)} down{remainder}"
    )


def _nodes_table(progress: JobProgress) -> Table:
    """The nodes; with the plan of each and why, where rounds are planned."""
    rows = [
        (
            name_or_id(each.name, each.node),
            each.state,
            f"{bar(each.steps_done, each.steps_total)} {each.steps_done}/{each.steps_total}",
            score(each.loss if each.steps_done else None),
            str(each.slot),
            round_from_one(each.reason),
        )
        for each in progress.participants
    ]
    if any(each.reason for each in progress.participants):
        return _NODE_COLUMNS, rows
    return _NODE_COLUMNS[:-1], [row[:-1] for row in rows]


def _round_rows(progress: JobProgress) -> list[tuple[str, ...]]:
    return [
        (
            str(point.number),
            f"{point.updates}/{point.participants}",
            score(point.loss),
            score(metric_after(progress.history, point.number)),
            f"{1000 * point.samples / max(1, point.duration_ms):.0f}",
            size(point.bytes_up),
            size(point.bytes_down or 0),
            span(point.duration_ms / 1000),
        )
        for point in progress.history.rounds[-ROUNDS_SHOWN:]
    ]


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
        self._forecast: JobForecastView | None = None

    def event(self, event: JobEvent, progress: JobProgress) -> None:
        """Print the event if it is worth a line."""
        match event.content:
            case None:
                pass
            case RoundRecordedEvent():
                say(round_text(progress.history.rounds[-1], planned_rounds(progress)))
            case EvaluationReadyEvent() as evaluation:
                say(f"  {evaluation_text(evaluation)}")
            case RoundPlannedEvent():
                for line in progress.plan_news:
                    say(f"  {line}")
            case content:
                if text := live_note(content, progress.names):
                    say(f"  {text}")

    def say(self, text: str) -> None:
        """Print the line."""
        say(f"  {text}")

    def refresh(self, progress: JobProgress) -> None:
        """Print the job's phase whenever it changes, and what is left when that is told anew."""
        job, forecast = progress.job, progress.forecast
        if forecast is not None and forecast is not self._forecast:
            say(f"  {left_text(forecast)}")
        self._forecast = forecast
        phase = job.phase if job else ""
        # A round's own line says that it is being aggregated, the command's error that it failed.
        if phase not in (self._phase, "aggregating", "failed"):
            self._phase = phase
            say(headline(progress))


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


TICK_S = 0.5
_DRAIN_S = 0.01
"""Wait for a further item of a burst, much longer than one takes to be handed over."""
SUMMARY_EVERY_S = 1.0
FORECAST_EVERY_S = 10.0


def follow(coordinator: Coordinator, job_id: str, view: WatchView) -> JobProgress:
    """Show a job from its first event until it has ended.

    Raises:
        HyperGPUError: The job is unknown, or its coordinator stays away.
    """
    with Watched(coordinator, job_id, view) as job_watch:
        while not job_watch.has_ended:
            job_watch.tick()
        return job_watch.progress


class Watched:
    """A job being followed, for callers that do other things between ticks."""

    def __init__(self, coordinator: Coordinator, job_id: str, view: WatchView) -> None:
        self._coordinator = coordinator
        self._job_id = job_id
        self._view = view
        self._is_away = False
        self._forecast_at_s = time.monotonic()
        self.progress = self._with_summary(JobProgress())
        self._asked_at_s = time.monotonic()
        self._updates = coordinator.watch(job_id)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Stop following."""
        self._updates.close()

    @property
    def has_ended(self) -> bool:
        """The job is over and everything journalled has been shown."""
        job = self.progress.job
        return self._updates.is_over and job is not None and job.phase in ENDED

    def tick(self) -> list[JobEvent]:
        """Take in the updates of half a second and show them; returns the events among them."""
        events = []
        wait_s = TICK_S
        while (update := self._updates.poll(wait_s)) is not None:
            if isinstance(update, JobEvent):
                events.append(update)
                self.progress = with_event(self.progress, update)
                self._view.event(update, self.progress)
            else:
                self.progress = with_participants(self.progress, update.participants)
            wait_s = _DRAIN_S
        now_s = time.monotonic()
        if self._updates.is_over or now_s - self._asked_at_s >= SUMMARY_EVERY_S:
            self._asked_at_s = now_s
            self.progress = self._with_summary(self.progress)
        self._view.refresh(self.progress)
        return events

    def say(self, text: str) -> None:
        """Show a line that is in no journal."""
        self.progress = with_note(self.progress, text)
        self._view.say(text)

    def _with_summary(self, progress: JobProgress) -> JobProgress:
        now_s = time.monotonic()
        wants_forecast = now_s >= self._forecast_at_s
        if wants_forecast:
            self._forecast_at_s = now_s + FORECAST_EVERY_S
        try:
            detail = self._coordinator.job(self._job_id, wants_forecast=wants_forecast)
        except HyperGPUError as error:
            # A coordinator that is being restarted is no reason to stop watching.
            if progress.job is None or error.reason not in RESTARTING:
                raise
            self._say_away(is_away=True)
            reason = "the coordinator is away, trying again"
            return replace(progress, job=replace(progress.job, reason=reason))
        self._say_away(is_away=False)
        if wants_forecast or detail.job.phase in ENDED:
            progress = replace(progress, forecast=detail.forecast)
        return with_job(progress, detail.job, tuple(detail.participants))

    def _say_away(self, *, is_away: bool) -> None:
        """Say it once when the coordinator goes, and once when it is there again."""
        if is_away != self._is_away:
            self._is_away = is_away
            self._view.say(
                "lost the coordinator, trying again" if is_away else "the coordinator is back"
            )

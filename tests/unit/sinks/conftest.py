"""A job's journal of three rounds, and what reads the figures of one back."""

from collections.abc import Callable

import pytest

from hypergpu.user.client.values import JobDetail, JobEvent, JobView
from hypergpu.user.sinks.sink import Sink, with_sinks
from hypergpu.user.terminal.watch import JobProgress, WatchView
from tests.dashboard_journal import measured_work

NODE = "0x" + "ab" * 20
SPEC: dict[str, object] = {
    "workload": "digits-mlp",
    "pay": {"unit_price": 1000},
    "inner": {"learning_rate": 0.001},
}
ROUNDS = 3
Watch = Callable[[Sink, list[JobEvent]], None]


def detail(phase: str = "training") -> JobDetail:
    job = JobView(
        id="job-0123456789ab",
        name="first",
        phase=phase,
        reason="",
        round=ROUNDS,
        rounds=ROUNDS,
        nodes=1,
        loss=None,
        metric=None,
        metric_name="accuracy",
        bytes_up=0,
        bytes_down=0,
        updates_accepted=0,
        updates_rejected=0,
        samples=0,
        model=None,
        at_ms=0,
    )
    return JobDetail(job=job, spec=SPEC, participants=[], model_bytes=0)


@pytest.fixture
def journal() -> list[JobEvent]:
    """Each evaluation comes behind the next round, as it does where rounds are quick."""
    bodies: list[tuple[str, dict[str, object]]] = [("JobCreated", {})]
    for number in range(ROUNDS):
        works = [measured_work(NODE, number, 10_000, samples=640)]
        record_fields = {
            "loss": 1.0 / (number + 1),
            "samples": 640,
            "participants": 2,
            "bytes_up": 900,
        }
        evaluation_fields = {"loss": 0.5, "metric": 0.25 * number, "metric_name": "accuracy"}
        bodies += [
            ("RoundRecorded", {"round": number, **record_fields}),
            ("RoundMeasured", {"round": number, "updates": works}),
            ("EvaluationReady", {"round": max(number, 1), **evaluation_fields}),
        ]
    return [
        JobEvent(sequence=number, at_ms=1000 * number, kind=kind, body=body)
        for number, (kind, body) in enumerate(bodies)
    ]


@pytest.fixture
def watch() -> Watch:
    """Watch a journal from its first event, as far as it goes."""

    def watch_events(sink: Sink, events: list[JobEvent]) -> None:
        ended_job = JobProgress(detail("finished").job)
        with with_sinks(WatchView(), detail(), [sink]) as view:
            for event in events:
                view.event(event, JobProgress())
            view.refresh(ended_job)

    return watch_events

"""A watch across an absence of the coordinator."""

import pytest

from hypergpu.client import ConnectionTarget, Coordinator, JobEvent
from hypergpu.terminal.progress import JobProgress
from hypergpu.terminal.views import PlainView
from hypergpu.terminal.watch import Watched, follow
from hypergpu.wire.token import parse_token
from tests.unit.cli.fake_service import EVENTS, JOB, FakeService, operator_token, serving

TICKS_MOST = 40


def test_absence_is_told_once_and_so_is_the_return(
    service: FakeService, capsys: pytest.CaptureFixture[str]
) -> None:
    with (
        serving(service) as port,
        Coordinator(
            ConnectionTarget(f"127.0.0.1:{port}", parse_token(operator_token(port)), 5.0)
        ) as there,
    ):
        watched = Watched(there, JOB, PlainView())
        lines: list[str] = []

        def tick_until(line: str) -> None:
            for _ in range(TICKS_MOST):
                watched.tick()
                lines.extend(capsys.readouterr().out.splitlines())
                if line in lines:
                    break

        service.is_away = True
        tick_until("  lost the coordinator, trying again")
        service.is_away = False
        tick_until("  the coordinator is back")
    assert lines.count("  lost the coordinator, trying again") == 1
    assert lines.count("  the coordinator is back") == 1


def test_a_watch_has_not_ended_before_every_event_was_shown(service: FakeService) -> None:
    sequences: list[int] = []

    class Recorder(PlainView):
        def event(self, event: JobEvent, progress: JobProgress) -> None:
            sequences.append(event.sequence)

    service.jobs[0].phase = "finished"
    with (
        serving(service) as port,
        Coordinator(
            ConnectionTarget(f"127.0.0.1:{port}", parse_token(operator_token(port)), 60.0)
        ) as there,
    ):
        follow(there, JOB, Recorder())
    assert sequences == list(range(len(EVENTS)))

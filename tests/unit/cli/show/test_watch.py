"""A watch across an absence of the coordinator."""

import os

import pytest

from hypergpu.client.calls import Coordinator
from hypergpu.client.connection import Target
from hypergpu.terminal.views import PlainView
from hypergpu.terminal.watch import Follower, Watched
from hypergpu.wire.token import parse_token
from tests.unit.cli.fake_service import EVENTS, JOB, FakeService, operator_token, serving

TICKS_MOST = 40


def test_absence_is_told_once_and_so_is_the_return(
    service: FakeService, capsys: pytest.CaptureFixture[str]
) -> None:
    with (
        serving(service) as port,
        Coordinator(Target(f"127.0.0.1:{port}", parse_token(operator_token(port)), 5.0)) as there,
    ):
        watched = Watched(there, JOB, PlainView())
        lines: list[str] = []

        def tick_until_asked(times: int) -> None:
            goal = service.called.count("GetJob") + times
            for _ in range(TICKS_MOST):
                watched.tick()
                if service.called.count("GetJob") >= goal:
                    break
            lines.extend(capsys.readouterr().out.splitlines())

        service.is_away = True
        tick_until_asked(2)
        service.is_away = False
        tick_until_asked(1)
        watched.close()
    assert lines.count("  lost the coordinator, trying again") == 1
    assert lines.count("  the coordinator is back") == 1


def test_a_stream_that_is_closed_has_not_told_all_while_something_of_it_is_untaken(
    service: FakeService,
) -> None:
    with (
        serving(service) as port,
        Coordinator(Target(f"127.0.0.1:{port}", parse_token(operator_token(port)), 60.0)) as there,
    ):
        follower = Follower(there, JOB)
        follower.start()
        taken = [next(follower.messages(60.0)) for _ in EVENTS[1:]]
        while not follower._is_complete:
            os.sched_yield()
        assert not follower.has_told_all
        taken += follower.messages(60.0)
        assert follower.has_told_all
        follower.stop()
    assert [message.event.sequence for message in taken] == list(range(len(EVENTS)))

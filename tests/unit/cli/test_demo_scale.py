"""The demo that loses its coordinator: when it kills, and what it finds wrong at the end."""

from datetime import UTC, datetime
from pathlib import Path

import msgspec
import pytest
from typer.testing import CliRunner

from benchmarks.ours.demo.__main__ import app
from benchmarks.ours.demo.postgresql import server_programs
from benchmarks.ours.demo.scale import CoordinatorFault, ScaleOutcome, TakenOver, outcome_faults
from hypergpu.clock import unix_ms
from hypergpu.errors import HyperGPUError, Reason
from hypergpu.units import Milliseconds, Samples
from hypergpu.user.cli.demo.job import plan
from hypergpu.user.cli.demo.logs import LogLine
from hypergpu.user.cli.demo.settlement import DemoPay
from hypergpu.user.client import JobEvent
from hypergpu.user.client.history import History, RoundPoint
from hypergpu.user.terminal.commands import USAGE_STATUS

NODES = 3
SPEC = plan(NODES, is_short=True, worker="numpy", is_fixed=True).spec
PAY = DemoPay(receipts=6, earned=60, paid=60, transactions=2, epochs=1, decimals=0)
OUTCOME = ScaleOutcome(
    undisturbed="aa",
    model="aa",
    updates=6,
    accepted=[(round_, node) for round_ in range(2) for node in "xyz"],
    pay=PAY,
    ray_starts=2,
    taken_over=TakenOver(round=2, after_s=7.0),
)


class LostCoordinators:
    """A cluster of which nothing is left to kill but a count."""

    def __init__(self, logs: Path) -> None:
        self.logs = logs
        self.lost = 0

    def lose_active(self) -> int:
        self.lost += 1
        return 4711

    def dead(self) -> list[str]:
        return []


def events(*kinds: str) -> list[JobEvent]:
    body = {"node": "0x" + "ab" * 20, "round": 0, "update": {}}
    return [JobEvent(number, Milliseconds(0), kind, body) for number, kind in enumerate(kinds)]


def log(logs: Path, name: str, event: str, *, seconds: int) -> None:
    """A program's line of so many seconds from now."""
    at = datetime.fromtimestamp(unix_ms() / 1000 + seconds, UTC)
    line = LogLine(event, at)
    with (logs / f"{name}.log").open("ab") as file:
        file.write(b"Ray says something\n" + msgspec.json.encode(line) + b"\n")


def history(rounds: int) -> History:
    samples = Samples(SPEC.stated_samples // SPEC.training.rounds)
    points = (RoundPoint(number=1, duration_ms=Milliseconds(1), samples=samples),) * rounds
    return History(rounds=points)


def test_the_coordinator_is_killed_once_half_way_in_a_round_of_which_it_has_a_part(
    tmp_path: Path,
) -> None:
    cluster = LostCoordinators(tmp_path)
    fault = CoordinatorFault(cluster, SPEC)
    half = SPEC.training.rounds // 2
    assert fault.advance(events("UpdateReceived"), history(half - 1)) == ""
    assert fault.advance(events("RoundRecorded"), history(half)) == ""
    text = fault.advance(events("UpdateReceived"), history(half))
    assert text.startswith(f"SIGKILL to coordinator-1 (process 4711) in round {half + 1}")
    assert "1 of 3 updates" in text
    assert fault.advance(events("UpdateReceived"), history(half)) == ""
    assert fault.taken_over is None
    log(tmp_path, "coordinator-2", "serving", seconds=7)
    log(tmp_path, "node-1", "UploadAccepted", seconds=1)
    log(tmp_path, "node-2", "UploadAccepted", seconds=9)
    message = fault.advance(events("CoordinatorChanged", "UpdateReceived"), history(half))
    assert "s after the kill coordinator-2 accepted the next update" in message
    assert fault.taken_over is not None
    assert (fault.taken_over.round, cluster.lost) == (half + 1, 1)
    assert fault.taken_over.after_s > 8.9


def test_it_is_killed_also_where_the_events_of_whole_rounds_come_at_once(tmp_path: Path) -> None:
    cluster = LostCoordinators(tmp_path)
    fault = CoordinatorFault(cluster, SPEC)
    for number in range(1, SPEC.training.rounds):
        fault.advance(events(*["UpdateReceived"] * NODES, "RoundRecorded"), history(number))
    assert cluster.lost == 1


def test_a_whole_outcome_has_no_fault() -> None:
    assert outcome_faults(OUTCOME) == []
    assert outcome_faults(OUTCOME._replace(pay=PAY._replace(paid=None))) == []


@pytest.mark.parametrize(
    ("outcome", "fault"),
    [
        (OUTCOME._replace(model="bb"), "the models differ"),
        (OUTCOME._replace(taken_over=None), "no update was accepted after the kill"),
        (
            OUTCOME._replace(accepted=[*OUTCOME.accepted, (1, "y")]),
            "accepted twice: round 2 of y",
        ),
        (OUTCOME._replace(pay=PAY._replace(paid=70)), "70 of 60 was paid"),
        (
            OUTCOME._replace(pay=PAY._replace(receipts=7)),
            "7 receipts were signed for 6 updates",
        ),
        (OUTCOME._replace(updates=9), "6 of 9 updates were accepted"),
        (OUTCOME._replace(ray_starts=0), "Ray computed nothing"),
    ],
)
def test_whatever_differs_is_named(outcome: ScaleOutcome, fault: str) -> None:
    assert outcome_faults(outcome) == [fault]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "add FIXED=1"),
        (["--fixed", "--attack"], "ATTACK cannot be had with SCALE=1"),
        (["--fixed", "--net", "tunnel"], "NET cannot be had with SCALE=1"),
    ],
)
def test_options_that_mean_something_else_are_refused(words: list[str], said: str) -> None:
    result = CliRunner().invoke(app, ["scale", *words])
    assert result.exit_code == USAGE_STATUS
    assert said in " ".join(result.output.replace("│", " ").split())


def test_the_newest_postgresql_that_has_a_server_is_taken(tmp_path: Path) -> None:
    for version in ("9", "15", "17"):
        (tmp_path / version / "bin").mkdir(parents=True)
    for version in ("9", "15"):
        for name in ("initdb", "postgres"):
            (tmp_path / version / "bin" / name).touch()
    assert server_programs(tmp_path) == tmp_path / "15" / "bin"


def test_without_a_server_the_package_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(HyperGPUError) as failure:
        server_programs(tmp_path)
    assert failure.value.reason is Reason.MACHINE_UNFIT
    assert failure.value.fix == "install it: apt-get install postgresql"

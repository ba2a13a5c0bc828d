from pathlib import Path

import pytest

from coordinator.__main__ import main
from coordinator.config import Settings
from coordinator.core.plan.decision import PlanRequest
from coordinator.shell.commands.planning import with_line
from hypergpu.units import Milliseconds, Samples
from tests.unit.job_states import AWARE

REQUEST = PlanRequest(
    round=0,
    at_ms=Milliseconds(0),
    spec=AWARE,
    candidates={},
    samples_done=Samples(0),
    samples_total=Samples(48),
)


def test_a_plan_is_told_what_the_stated_line_carries_besides_its_headers(tmp_path: Path) -> None:
    stated = with_line(REQUEST, Settings(data_dir=tmp_path, line_mbit_s=100))
    assert 96_000_000 < stated.line_bits_per_s < 97_000_000
    assert with_line(REQUEST, Settings(data_dir=tmp_path)).line_bits_per_s == 0


def test_a_line_of_less_than_nothing_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--line-mbit-s", "-1"]) != 0
    assert "line_mbit_s" in capsys.readouterr().err

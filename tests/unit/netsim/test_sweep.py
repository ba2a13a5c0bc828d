"""A sweep simulates each world with each seed once, and says how long its jobs took."""

from pathlib import Path

import msgspec
import pytest

from hypergpu.digests import digest_of
from netsim.cli.app import app
from netsim.cli.sweep import SweepReport, SweepRow, sweep_lines

GOLDEN = Path(__file__).parents[2] / "vectors" / "cli" / "netsim-sweep.json"
WORLD = """
name = "home"
[[nodes]]
name = "van"
count = 2
profile = "home-fibre"
[job]
workload = "digits-softmax"
strategy = "diloco"
[job.training]
rounds = 2
nodes = 2
"""
ROW = SweepRow(
    world="home",
    seed=0,
    phase="finished",
    reason="all rounds are done",
    rounds=2,
    round_ms=1500,
    duration_ms=3000,
    journal=digest_of(b"journal"),
)


def sweep(folder: Path, *words: str) -> int:
    with pytest.raises(SystemExit) as program_exit:
        app(
            args=["sweep", *words, f"--out={folder / 'out'}", "--processes=2"],
            prog_name="hypergpu netsim",
        )
    return int(program_exit.value.code or 0)


def test_a_sweep_goes_on_from_reports_of_the_same_inputs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "home.toml").write_text(WORLD, "utf-8")
    reports = []
    for seeds in (1, 2):
        assert sweep(tmp_path, str(tmp_path / "home.toml"), f"--seeds={seeds}", "--json") == 0
        reports.append(msgspec.json.decode(capsys.readouterr().out, type=SweepReport))
    first, again = reports
    assert [(row.world, row.seed, row.rounds) for row in again.rows] == [
        ("home", 0, 2),
        ("home", 1, 2),
    ]
    assert (first.reused, again.reused) == (0, 1)
    assert again.rows[0] == first.rows[0]
    assert again.rows[0].journal != again.rows[1].journal


def test_a_world_without_a_job_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "none.toml").write_text(WORLD.partition("[job]")[0], "utf-8")
    assert sweep(tmp_path, str(tmp_path / "none.toml")) != 0
    assert "the world home has no job" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_worlds_stand_with_the_spread_of_their_seeds() -> None:
    slow = msgspec.structs.replace(ROW, seed=1, duration_ms=9000)
    broken_row = msgspec.structs.replace(ROW, seed=2, phase="broken", reason="never finished")
    lines = sweep_lines(SweepReport(rows=(ROW, slow, broken_row), reused=0))
    assert lines[1].split() == ["home", "2", "of", "3", "6.0", "3.0", "9.0"]
    assert lines[2] == "  seed 2: broken: never finished"


def test_the_document_stays_as_it_is() -> None:
    report = SweepReport(rows=(ROW,), reused=0)
    document = msgspec.json.format(msgspec.json.encode(report), indent=2) + b"\n"
    assert document == GOLDEN.read_bytes()

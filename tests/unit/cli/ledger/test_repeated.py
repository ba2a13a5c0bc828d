"""A fix that names a command names the folder that was given."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from hypergpu.cli.ledger.repeated import with_folder
from hypergpu.cli.main import app

FOLDER = Path("/my node")


@pytest.mark.parametrize(
    ("option", "fix", "told"),
    [
        ("--state-dir", "see hypergpu node wallet", "see hypergpu node wallet {}"),
        (
            "--state-dir",
            "hypergpu ledger stake AMOUNT stakes",
            "hypergpu ledger stake AMOUNT {} stakes",
        ),
        (
            "--state-dir",
            "hypergpu ledger register --stake 7",
            "hypergpu ledger register --stake 7 {}",
        ),
        ("--state-dir", "see hypergpu ledger show", "see hypergpu ledger show"),
        (
            "--data-dir",
            "first: hypergpu ledger reclaim JOB",
            "first: hypergpu ledger reclaim JOB {}",
        ),
        ("--data-dir", "then start: hypergpu up", "then start: hypergpu up {}"),
    ],
)
def test_each_command_gets_its_folder_once(option: str, fix: str, told: str) -> None:
    wanted = told.format(f"{option} '/my node'")
    assert with_folder(fix, option, FOLDER) == wanted
    assert with_folder(wanted, option, FOLDER) == wanted


def test_a_node_command_repeats_the_folder_that_it_was_given(tmp_path: Path) -> None:
    words = ["ledger", "claim", "job-0", "--state-dir", str(tmp_path)]
    ended = CliRunner().invoke(app, words)
    assert f"Fix: see hypergpu node wallet --state-dir {tmp_path}" in ended.stderr
    words = ["ledger", "claim", "job-0"]
    ended = CliRunner(env={"HYPERGPU_STATE_DIR": str(tmp_path)}).invoke(app, words)
    assert ended.stderr.endswith("Fix: see hypergpu node wallet\n")

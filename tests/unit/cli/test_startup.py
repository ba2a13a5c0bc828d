"""`hypergpu --help` is quick because it imports next to nothing."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from hypergpu.cli.main import app
from netsim.cli.app import app as netsim

MANUAL = (Path(__file__).parents[3] / "docs/cli.md").read_text("utf-8")
HEAVY = ("grpc", "torch", "numpy", "sqlalchemy", "rich", "msgspec", "cryptography", "asyncio")


def run(code: str) -> str:
    command = [sys.executable, "-c", code]
    return subprocess.run(command, capture_output=True, check=True, text=True).stdout


@pytest.mark.parametrize("words", [["--help"], ["job", "--help"], ["job", "export", "--help"]])
def test_help_imports_nothing_heavy(words: list[str]) -> None:
    code = (
        "import sys\n"
        "from hypergpu.cli.main import app\n"
        f"app({words!r}, standalone_mode=False)\n"
        f"print('heavy:', [name for name in {HEAVY!r} if name in sys.modules])\n"
    )
    assert run(code).splitlines()[-1] == "heavy: []"


def test_every_command_of_the_manual_has_help() -> None:
    commands = re.findall(r"^### `hypergpu ([a-z ]+)`", MANUAL, re.MULTILINE)
    assert len(commands) >= 18
    for words in commands:
        name, *rest = words.split()
        # A program of its own, behind the same name.
        asked = (netsim, [*rest, "--help"]) if name == "netsim" else (app, [name, *rest, "--help"])
        ended = CliRunner().invoke(*asked)
        assert ended.exit_code == 0, words
        assert "Usage: " in ended.stdout

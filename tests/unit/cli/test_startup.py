"""`hypergpu --help` is quick because it imports next to nothing."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from hypergpu.cli.main import app

MANUAL = (Path(__file__).parents[3] / "docs/cli.md").read_text("utf-8")
HEAVY = ("grpc", "torch", "numpy", "sqlalchemy", "rich", "msgspec", "cryptography", "asyncio")


def run(code: str) -> str:
    command = [sys.executable, "-c", code]
    return subprocess.run(command, capture_output=True, check=True, text=True).stdout


@pytest.mark.parametrize("words", ["--help", "job export --help", "netsim run --help"])
def test_help_imports_nothing_heavy(words: str) -> None:
    code = (
        "import sys\n"
        "from hypergpu.cli.main import app\n"
        f"app({words.split()!r}, standalone_mode=False)\n"
        f"print('heavy:', [name for name in {HEAVY!r} if name in sys.modules])\n"
    )
    assert run(code).splitlines()[-1] == "heavy: []"


def test_every_command_of_the_manual_has_help() -> None:
    commands = re.findall(r"^### `hypergpu ([a-z ]+)`", MANUAL, re.MULTILINE)
    assert len(commands) >= 18
    for words in commands:
        ended = CliRunner().invoke(app, [*words.split(), "--help"])
        assert ended.exit_code == 0, words
        assert "Usage: " in ended.stdout

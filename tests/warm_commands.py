"""Commands that may load torch: forks of the process that has it loaded, as workers are in tests.

They are given no signal. A command that is to get one is started by itself.
"""

import subprocess
from collections.abc import Mapping

from benchmarks.hooks.warm_client import COMMANDS_VARIABLE
from hypergpu.command_line import program
from tests.processes import ENVIRONMENT


def run_command(*words: str, environment: Mapping[str, str]) -> "subprocess.CompletedProcess[str]":
    """Run `hypergpu` to its end, with these variables and those of tests."""
    return subprocess.run(
        program("hypergpu.user.cli", *words),
        env={**ENVIRONMENT, **environment, COMMANDS_VARIABLE: "1"},
        check=False,
        capture_output=True,
        text=True,
    )


def command_output(*words: str, environment: Mapping[str, str]) -> str:
    """What a command says that succeeds."""
    process = run_command(*words, environment=environment)
    assert process.returncode == 0, process.stderr
    return process.stdout

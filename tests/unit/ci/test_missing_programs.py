"""Tests whose programs a machine lacks: named with the fix, and a failure in CI."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.programs import PROGRAMS, WITHOUT_VARIABLE, install_command, lacking_packages

ROOT = Path(__file__).parents[3]
TEST = "tests/conformance/test_page_history.py"


def run_without(needs: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """A run of one file's tests, with two workers, on a machine that lacks something."""
    variables = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")}
    command = [sys.executable, "-m", "pytest", "-q", "-n", "2", "-p", "no:cacheprovider", TEST]
    return subprocess.run(
        command,
        cwd=ROOT,
        env={**variables, WITHOUT_VARIABLE: needs, **environment},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize(("environment", "status"), [({"CI": ""}, 0), ({"CI": "true"}, 1)])
def test_what_cannot_run_is_named_and_fails_in_ci_alone(
    environment: dict[str, str], status: int
) -> None:
    process = run_without("database", **environment)
    assert process.returncode == status, process.stdout
    (line,) = [each for each in process.stdout.splitlines() if "did not run" in each]
    count, _, rest = line.partition(" ")
    assert int(count) >= 5
    assert rest.startswith(f"did not run, without database: {TEST}. Fix: install postgresql")


def test_packages_are_those_of_what_is_missing() -> None:
    absent = [each._replace(is_here=lambda: False) for each in PROGRAMS if each.name == "sshd"]
    assert lacking_packages(absent) == ("openssh-server", "openssh-client")
    assert lacking_packages([each._replace(is_here=lambda: True) for each in absent]) == ()
    assert install_command(["chromium"], is_root=False) == "sudo apt-get install -y chromium"

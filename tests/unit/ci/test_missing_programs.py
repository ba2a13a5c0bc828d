"""Tests whose programs a machine lacks: named with the fix, and a failure in CI."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.programs import PROGRAMS, WITHOUT_VARIABLE, install_command, lacking_packages
from tests.warm_workers import RUN_VARIABLE

ROOT = Path(__file__).parents[3]
TEST = "tests/conformance/test_page_history.py"


def run_without(needs: str, workers: int, **environment: str) -> subprocess.CompletedProcess[str]:
    """A run of one file's tests, by so many processes, on a machine that lacks something."""
    variables = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")}
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-n",
        str(workers),
        "-p",
        "no:cacheprovider",
        TEST,
    ]
    return subprocess.run(
        command,
        cwd=ROOT,
        # Two servers of forks would take longer to start than the tests to run.
        env={**variables, WITHOUT_VARIABLE: needs, RUN_VARIABLE: "0", **environment},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize(("ci", "workers", "status"), [("", 0, 0), ("true", 2, 1)])
def test_what_cannot_run_is_named_and_fails_in_ci_alone(ci: str, workers: int, status: int) -> None:
    process = run_without("database", workers, CI=ci)
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

"""`hypergpu workload check` with a real evaluator, a real worker and a real `load.py`."""

import json
import subprocess
from collections.abc import Callable

import pytest

from tests import tiny_package
from tests.integration.cli.conftest import PROGRAM, Ended, home

Check = Callable[..., Ended]


@pytest.fixture(scope="module")
def check(tmp_path_factory: pytest.TempPathFactory) -> Check:
    """The command, where a package with a workload is installed."""
    folder = tmp_path_factory.mktemp("check")
    path = tiny_package.install(folder / "packages", 3)

    def run(*words: str) -> Ended:
        return subprocess.run(
            [*PROGRAM, "workload", "check", *words],
            capture_output=True,
            check=False,
            text=True,
            env={**home(folder), "PYTHONPATH": path},
            cwd=folder,
        )

    return run


def test_a_package_that_works_passes_each_step(check: Check) -> None:
    process = check(tiny_package.PACKAGE, "--json")
    assert process.returncode == 0, process.stderr
    answer = json.loads(process.stdout)
    assert (answer["schema"], answer["is_fit"]) == ("hypergpu/workload/1", True)
    steps = ["tiny", "model", "first model", "training", "evaluation", "gradient", "export"]
    assert [each["name"] for each in answer["checks"]] == steps
    assert {each["verdict"] for each in answer["checks"]} == {"ok"}
    assert "a step with 8 samples, loss 3" in answer["checks"][3]["what"]


def test_a_step_that_fails_comes_with_its_fix(check: Check) -> None:
    process = check("tiny", "--option", "fault=true")
    assert process.returncode == 16
    last = process.stdout.splitlines()[-1]
    assert last.split() == [
        *("fail", "training", "ValueError:", "the", "test", "broke", "it."),
        *("Fix:", "leave", "options.fault", "out"),
    ]
    assert "tiny does not pass: training" in process.stderr

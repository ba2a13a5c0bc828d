import json
import subprocess
import sys

import pytest

from benchmarks.house.tree import ROOT

LISTING = "import json, sys, {module}; print(json.dumps(sorted(sys.modules)))"
HEAVY = {"sklearn", "sqlalchemy", "torch", "torchvision"}
PROCESSES = {"coordinator", "dashboard_api", "gpu_node"}


def loaded_by(module: str) -> set[str]:
    """Return the modules that a fresh interpreter holds after importing one."""
    argv = [sys.executable, "-c", LISTING.format(module=module)]
    answer = subprocess.run(argv, cwd=ROOT, check=True, capture_output=True)
    return set(json.loads(answer.stdout))


def test_the_command_line_starts_without_what_only_processes_need() -> None:
    assert loaded_by("hypergpu.cli.main") & {*HEAVY, *PROCESSES, "grpc", "numpy"} == set()


@pytest.mark.parametrize("module", ["coordinator.__main__", "gpu_node.__main__"])
def test_a_light_process_starts_without_torch(module: str) -> None:
    assert loaded_by(module) & {"sklearn", "torch", "torchvision"} == set()


@pytest.mark.parametrize(
    "module", ["hypergpu.ids", "coordinator.core.round.transition", "gpu_node.core"]
)
def test_a_core_loads_no_tensor_library(module: str) -> None:
    assert loaded_by(module) & {*HEAVY, "grpc", "numpy"} == set()

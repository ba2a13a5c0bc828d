"""What the entries of the built-in workloads say, which cards of exports repeat."""

import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

from hypergpu.workloads.built_in import BUILT_IN
from hypergpu.workloads.entry import WorkloadEntry
from tests.tiny_package import NAME, PACKAGE, install


@pytest.mark.parametrize(
    "entry", [each for each in BUILT_IN if each.kind != "null"], ids=lambda each: each.name
)
def test_every_entry_says_how_samples_are_prepared_and_split(entry: WorkloadEntry) -> None:
    assert entry.preprocessing
    assert entry.split


LOOK = f"""
from hypergpu.workloads.installed import installed_packages, package_of
print({PACKAGE!r} in installed_packages(), repr(package_of({NAME!r})))
"""


def test_a_package_that_is_damaged_or_half_removed_is_passed_over(tmp_path: Path) -> None:
    environment = {"PYTHONPATH": f"{install(tmp_path, 1)}:{Path(__file__).parents[3]}"}

    def look() -> str:
        command = [sys.executable, "-c", LOOK]
        ran = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
        return ran.stdout.strip()

    assert look() == f"True {PACKAGE!r}"
    (about,) = tmp_path.glob("*.dist-info")
    points = (about / "entry_points.txt").read_bytes()
    (about / "entry_points.txt").write_bytes(b"\xff\xfe")
    assert look() == "False ''"
    (about / "entry_points.txt").write_bytes(points)
    assert look() == f"True {PACKAGE!r}"
    (about / "METADATA").unlink()
    assert look() == "False ''"


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("hypergpu.workloads.workload", "ArraySamples"),
        ("hypergpu.workloads.workload", "Dataset"),
        ("hypergpu.workloads.workload", "DatasetError"),
        ("hypergpu.workloads.workload", "Sums"),
        ("hypergpu.workloads.entry", "Option"),
        ("hypergpu.workloads.entry", "Options"),
        ("hypergpu.workloads.entry", "WorkloadEntry"),
        ("hypergpu.workloads.networks.task", "Classification"),
    ],
)
def test_packages_of_workloads_find_what_version_0_1_documented(module: str, name: str) -> None:
    assert hasattr(import_module(module), name)

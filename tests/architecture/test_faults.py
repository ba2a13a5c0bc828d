"""Planted faults fit the code as it is, so that `make faults` can find them."""

import subprocess
from pathlib import Path

import pytest

from tests.faults.__main__ import ROOT, PlantedFault, planted_faults


@pytest.mark.parametrize("fault", [*planted_faults()], ids=lambda fault: fault.name)
def test_a_planted_fault_can_be_applied_and_its_tests_exist(fault: PlantedFault) -> None:
    process = subprocess.run(
        ["git", "apply", "--check", str(fault.patch)],
        cwd=ROOT,
        check=False,
        capture_output=True,
        text=True,
    )
    assert not process.returncode, process.stderr
    assert fault.tests
    assert all(Path(ROOT / path).exists() for path in fault.tests)

import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from coordinator.shell.failpoints import NAMES, arm
from hypergpu.errors import HyperGPUError

ROOT = Path(__file__).parents[3]


def run_passes(armed: str) -> subprocess.CompletedProcess[bytes]:
    """A process that passes one point three times, saying so each time."""
    script = (
        "import os; from coordinator.shell.failpoints import arm, failpoint\n"
        f"arm({armed!r})\n"
        "for _ in range(3): os.write(1, b'.'); failpoint('act.done')\n"
    )
    command = [sys.executable, "-c", script]
    return subprocess.run(command, capture_output=True, cwd=ROOT, check=False)


def test_the_process_is_killed_at_the_pass_that_is_named() -> None:
    ended = run_passes("persist.written,act.done:2")
    assert (ended.returncode, ended.stdout) == (-signal.SIGKILL, b"..")


def test_a_point_that_is_not_armed_is_passed() -> None:
    assert run_passes("").returncode == 0


@pytest.mark.parametrize("text", ["nowhere", "act.done:0", "act.done:x", "act.done:-1"])
def test_a_wrong_activation_is_refused(text: str) -> None:
    with pytest.raises(HyperGPUError, match="list-failpoints"):
        arm(text)


def test_every_name_is_passed_somewhere_and_every_pass_has_a_name() -> None:
    sources = (ROOT / "coordinator").rglob("*.py")
    found = {
        name
        for path in sources
        for name in re.findall(r'failpoint\("([a-z._]+)"\)', path.read_text())
    }
    assert found == set(NAMES)

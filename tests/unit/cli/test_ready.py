"""How `up` starts a coordinator, and one that hangs before it serves."""

import sys
from pathlib import Path

import pytest

from hypergpu.cli.machine.children import start
from hypergpu.cli.machine.up import Listen, SettlingBy, coordinator_command, wait_until_ready
from hypergpu.refusal import RefusalError


def test_a_coordinator_that_never_says_it_serves_is_killed() -> None:
    child = start([sys.executable, "-c", "import time; time.sleep(600)"], is_read=True)
    assert child.stdout is not None
    with child.stdout, pytest.raises(RefusalError, match="ended with status 137"):
        wait_until_ready(child, 0.5)
    assert child.poll() == -9


def test_up_has_its_coordinator_settle_again_what_failed_when_it_is_told_to() -> None:
    at = Listen(data_dir=Path("data"), settling=SettlingBy("anvil", retries_failed=True))
    assert coordinator_command(at)[-3:] == ["--chain", "anvil", "--retry-failed"]
    plain = Listen(data_dir=Path("data"), settling=SettlingBy("anvil"))
    assert coordinator_command(plain)[-2:] == ["--chain", "anvil"]

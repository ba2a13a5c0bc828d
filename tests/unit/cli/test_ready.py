"""A coordinator that hangs before it serves."""

import sys

import pytest

from hypergpu.cli.machine.children import start
from hypergpu.cli.machine.up import wait_until_ready
from hypergpu.refusal import RefusalError


def test_a_coordinator_that_never_says_it_serves_is_killed() -> None:
    child = start([sys.executable, "-c", "import time; time.sleep(600)"], is_read=True)
    assert child.stdout is not None
    with child.stdout, pytest.raises(RefusalError, match="ended with status 137"):
        wait_until_ready(child, 0.5)
    assert child.poll() == -9

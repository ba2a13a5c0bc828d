"""Forge's tests, and the long campaign of random calls against the invariants."""

import os
import re
import subprocess
from pathlib import Path
from typing import NamedTuple

from contracts.compile import CONTRACTS, MODULES

FORGE = next((MODULES / "@foundry-rs").glob("forge-*/bin/forge"), Path("forge"))
# As many calls make one of forge's runs; foundry.toml says the same.
DEPTH = 100


class Campaign(NamedTuple):
    """What random calls did to the invariants."""

    calls: int
    reverts: int
    is_broken: bool
    printed: str


def forge_test(*choice: str, **settings: str) -> subprocess.CompletedProcess[str]:
    """Run some of forge's tests; ``settings`` are variables of the environment."""
    return subprocess.run(
        [str(FORGE), "test", "--offline", *choice],
        cwd=CONTRACTS,
        env={**os.environ, **settings},
        capture_output=True,
        text=True,
        check=False,
    )


def random_calls(calls: int) -> Campaign:
    """Make about so many random calls, each campaign the same: a million take twenty minutes.

    Raises:
        RuntimeError: forge did not come to run them.
    """
    runs = {"FOUNDRY_INVARIANT_RUNS": str(max(1, calls // DEPTH))}
    answer = forge_test("--match-contract", "InvariantsTest", **runs)
    printed = answer.stdout + answer.stderr
    said = re.search(r"invariant_.*runs: \d+, calls: (\d+), reverts: (\d+)", printed)
    if said is None:
        raise RuntimeError(f"forge ran no invariant: {printed[-2000:]}")
    return Campaign(int(said[1]), int(said[2]), answer.returncode != 0, printed)

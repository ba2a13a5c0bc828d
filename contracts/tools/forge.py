"""Forge's tests, and campaigns of random calls against the invariants."""

import os
import re
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from contracts.compile import CACHE, CONTRACTS, MODULES

FORGE = next((MODULES / "@foundry-rs").glob("forge-*/bin/forge"), Path("forge"))
INVARIANTS = "InvariantsTest"
# As many calls make one of forge's runs; foundry.toml says the same.
DEPTH = 100
_CALLS_EACH = 50_000
"""Calls of one campaign, which is one process on one core."""


class FuzzCampaign(NamedTuple):
    """What random calls did to the invariants."""

    calls: int
    reverts: int
    is_broken: bool
    printed: str
    """By forge, of what it broke; empty where it broke nothing."""


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


def build() -> None:
    """Compile the tests, so that several processes find them compiled. About 8 s the first time.

    Raises:
        RuntimeError: they do not compile.
    """
    command = [str(FORGE), "build", "--offline"]
    process = subprocess.run(command, cwd=CONTRACTS, capture_output=True, text=True, check=False)
    if process.returncode != 0:
        raise RuntimeError(f"the contracts' tests do not compile: {process.stderr[-2000:]}")


def random_calls(calls: int) -> FuzzCampaign:
    """Make about so many random calls, the same ones each time: half a second of a core a thousand.

    They are shared out to campaigns with a seed each, as many at a time as there are cores.

    Raises:
        RuntimeError: forge did not come to run them.
    """
    build()
    counts = [min(_CALLS_EACH, calls - first) for first in range(0, calls, _CALLS_EACH)]
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as at_once:
        parts = list(at_once.map(_campaign, range(1, len(counts) + 1), counts))
    return FuzzCampaign(
        calls=sum(part.calls for part in parts),
        reverts=sum(part.reverts for part in parts),
        is_broken=any(part.is_broken for part in parts),
        printed="".join(part.printed for part in parts),
    )


def _campaign(seed: int, calls: int) -> FuzzCampaign:
    settings = {
        "FOUNDRY_FUZZ_SEED": hex(seed),
        "FOUNDRY_INVARIANT_RUNS": str(max(1, calls // DEPTH)),
        "FOUNDRY_INVARIANT_FAILURE_PERSIST_DIR": str(CACHE / "campaigns" / f"{seed}"),
    }
    answer = forge_test("--match-contract", f"^{INVARIANTS}$", **settings)
    output = answer.stdout + answer.stderr
    match = re.search(r"invariant_.*runs: \d+, calls: (\d+), reverts: (\d+)", output)
    if match is None:
        raise RuntimeError(f"forge ran no invariant: {output[-2000:]}")
    is_broken = answer.returncode != 0
    return FuzzCampaign(int(match[1]), int(match[2]), is_broken, output if is_broken else "")

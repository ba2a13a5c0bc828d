"""Seconds per round of the systems that we stand beside, each in an environment of its own.

Environments live in ``.venv-peers`` and are made on first use from the pinned files in ``locks``,
so that a peer's requirements never meet ours.
"""

import os
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Sequence
from pathlib import Path

import msgspec

from benchmarks.ours.cluster import BenchmarkError
from benchmarks.peers.measured import DEADLINE_S

ROOT = Path(__file__).parents[2]
ENVIRONMENTS = ROOT / ".venv-peers"
OWN = "own"
PEERS = {
    "gloo": OWN,
    "flower_lean": "flower",
    "flower_deployed": "flower",
    "hivemind_averager": "hivemind",
}
"""Each peer's script and the environment it runs in; `OWN` is the product's."""

BORROWS_OUR_PACKAGES = {"byzfl", "hivemind"}
"""Environments whose lock holds only what ours lacks: torch is large and is the same for both."""


class _Outcome(msgspec.Struct, frozen=True):
    seconds_per_round: tuple[float, ...]


def peer_seconds(name: str, parameters: int, nodes: int, rounds: int) -> tuple[float, ...]:
    """Measure one peer: uncompressed float32 rounds on loopback, nothing trained.

    The first call for a peer installs its environment, which may take a minute.

    Args:
        name: One of `PEERS`.
        parameters: float32 elements that each node sends and receives in a round.
        nodes: Nodes beside the hub; peers that average among themselves.
        rounds: Rounds to measure, after one that warms up.

    Returns:
        Seconds of each measured round, from the end of one to the end of the next.

    Raises:
        BenchmarkError: The script failed or took too long.
    """
    sizes = [f"--parameters={parameters}", f"--nodes={nodes}", f"--rounds={rounds}"]
    command = [str(python_of(PEERS[name])), "-m", f"benchmarks.peers.{name}", *sizes]
    last_line, _ = run_peer(name, command, DEADLINE_S)
    return msgspec.json.decode(last_line, type=_Outcome).seconds_per_round


def run_peer(name: str, command: Sequence[str], limit_s: float) -> tuple[bytes, str]:
    """Run a peer's script; return the last line of its output, and its log.

    Raises:
        BenchmarkError: It failed or took too long; the text ends with what it wrote last.
    """
    environment = {**os.environ, "FLWR_TELEMETRY_ENABLED": "0", "OMP_NUM_THREADS": "1"}
    try:
        run = subprocess.run(
            command, cwd=ROOT, env=environment, check=True, capture_output=True, timeout=limit_s
        )
    except subprocess.CalledProcessError as error:
        log_end = error.stderr[-2000:].decode(errors="replace")
        raise BenchmarkError(f"{name} failed: {log_end}") from None
    except subprocess.TimeoutExpired:
        raise BenchmarkError(f"{name} did not end within {limit_s:g} s") from None
    return run.stdout.splitlines()[-1], run.stderr.decode(errors="replace")


def python_of(environment: str) -> Path:
    """Return the interpreter of an environment, installed when its lock is newer than it."""
    if environment == OWN:
        return Path(sys.executable)
    folder, lock = ENVIRONMENTS / environment, ROOT / "locks" / f"{environment}.txt"
    python, stamp = folder / "bin" / "python", folder / ".installed"
    if not stamp.exists() or stamp.stat().st_mtime < lock.stat().st_mtime:
        print(f"Installing {environment} into {folder.relative_to(ROOT)}", file=sys.stderr)
        venv.create(folder)
        install = [sys.executable, str(ROOT / ".ci" / "install.py"), str(folder), str(lock)]
        subprocess.run(install, check=True)
        if environment in BORROWS_OUR_PACKAGES:
            _lend_our_packages(folder)
        stamp.touch()
    return python


def _lend_our_packages(folder: Path) -> None:
    """Let an environment find our packages behind its own."""
    (packages,) = (folder / "lib").glob("python3*/site-packages")
    ours = sysconfig.get_paths()["purelib"]
    (packages / "product.pth").write_text(f"{ours}\n", encoding="utf-8")

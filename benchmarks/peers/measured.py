"""What every peer's script shares: its arguments, its processes and its one line of output.

Standard library only, since each script runs in the environment of the peer it measures.
"""

import argparse
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

LOOPBACK = "127.0.0.1"
WARM_UP_ROUNDS = 1
DEADLINE_S = 600


def arguments() -> argparse.Namespace:
    """Read how large, how many, how often; ``rank`` and ``address`` are for spawned processes."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--parameters", type=int, required=True)
    parser.add_argument("--nodes", type=int, required=True)
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument("--rank", type=int, default=-1)
    parser.add_argument("--address", default="")
    return parser.parse_args()


def report(ends_s: Sequence[float]) -> None:
    """Print the seconds between the ends of successive rounds, the warm-up left out.

    Args:
        ends_s: When each round ended, warm-up rounds included, on one monotonic clock.
    """
    counted_ends_s = ends_s[WARM_UP_ROUNDS - 1 :]
    seconds = [after - before for before, after in itertools.pairwise(counted_ends_s)]
    print(json.dumps({"seconds_per_round": seconds}), flush=True)


def free_port() -> int:
    """Return a TCP port that nobody listens on right now."""
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        port: int = probe.getsockname()[1]
        return port


def same_script(options: argparse.Namespace, rank: int, address: str) -> list[str]:
    """Return the command that runs the calling script as process ``rank``."""
    spec = sys.modules["__main__"].__spec__
    if spec is None:
        raise RuntimeError("a peer's script runs as a module: python -m benchmarks.peers.NAME")
    sizes = [f"--{name}={getattr(options, name)}" for name in ("parameters", "nodes", "rounds")]
    return [sys.executable, "-m", spec.name, *sizes, f"--rank={rank}", f"--address={address}"]


@contextmanager
def running(commands: Sequence[Sequence[str]], *, cwd: str | None = None) -> Iterator[None]:
    """Keep processes running, with all they start, for as long as the context is open."""
    processes = [
        subprocess.Popen(command, cwd=cwd, stdout=sys.stderr, start_new_session=True)
        for command in commands
    ]
    try:
        yield
    finally:
        for process in processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

"""Peers' scripts over a world's lines."""

import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.ours.awareness.runs import TRIES, LateError
from benchmarks.peers.seconds import run_peer


def over_links(command: Sequence[str], world: Path) -> list[str]:
    """The command that runs another over a world's lines."""
    shape = [sys.executable, "-m", "netsim", "shape", str(world), "--backend", "tunnel"]
    return [*shape, "--", *command]


def sound_output(name: str, command: Sequence[str], limit_s: float) -> bytes:
    """The line that a script wrote last, when its links were as asked.

    Raises:
        LateError: They were late, the second time either.
        BenchmarkError: It broke, or took too long.
    """
    late = ""
    for _ in range(TRIES):
        last_line, wrote = run_peer(name, command, limit_s)
        late = next((line for line in wrote.splitlines() if line.startswith("INVALID")), "")
        if not late:
            return last_line
    raise LateError(f"{name}: {late}")

"""Shows the node on the daemon's terminal, by a process of its own: `hypergpu status`.

A terminal that is slow, stopped or gone holds up the viewer and never the training.
"""

import contextlib
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

from hypergpu.command_line import program
from hypergpu.privacy import public_environment

_LAST_WORD_S = 5.0
"""Time in which the viewer shows how the daemon ended."""


@contextlib.contextmanager
def run_viewer(folder: Path) -> Iterator[None]:
    """Show the reports in a node's folder while the block runs; the first one lies there.

    The viewer is in the terminal's foreground group, so that both stop and go on together. Ctrl-C
    is for the daemon alone: the viewer inherits that the signal is ignored.
    """
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        viewer = subprocess.Popen(
            program("hypergpu.user.cli", "status", "--state-dir", str(folder)),
            stdin=subprocess.DEVNULL,
            env=public_environment(),
        )
    finally:
        signal.signal(signal.SIGINT, before)
    try:
        yield
    finally:
        try:
            viewer.wait(_LAST_WORD_S)
        except subprocess.TimeoutExpired:
            viewer.kill()
            viewer.wait()

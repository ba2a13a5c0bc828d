"""Programs that one owner starts, each with a log, and ends all together."""

import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from hypergpu.leash import leash_command
from hypergpu.user.cluster.processes import kill_group, start

END_WITHIN_S = 5.0


class ChildStart(msgspec.Struct, frozen=True):
    """How a program is started."""

    command: Sequence[str]
    environment: Mapping[str, str] = {}
    secret: str | None = None
    """Written to its stdin, which then ends."""
    is_read: bool = False
    """Whether its standard output is read; else it goes to the log."""


class OwnedProcesses:
    """Processes that die with this one, whatever happens to it."""

    def __init__(self, logs: Path) -> None:
        """Start nothing.

        Args:
            logs: Folder of the logs; it is made.
        """
        self._logs = logs
        self._living: list[subprocess.Popen[str]] = []
        logs.mkdir(parents=True, exist_ok=True)

    def start(self, name: str, how: ChildStart) -> subprocess.Popen[str]:
        """Start one whose log has its name. Call from the main thread."""
        child = start(
            leash_command(list(how.command)),
            secret=how.secret,
            log=self._logs / f"{name}.log",
            is_read=how.is_read,
            environment=how.environment,
        )
        self._living.append(child)
        return child

    def kill(self, child: subprocess.Popen[str]) -> int:
        """SIGKILL it and what it started, once: later its number may be somebody else's."""
        if child in self._living:
            kill_group(child)
            self._living.remove(child)
            if child.stdout is not None:
                child.stdout.close()
        return child.pid

    def end(self) -> None:
        """Ask every process to end, then end those that have not."""
        living_children = [child for child in self._living if child.poll() is None]
        # The second SIGTERM stops a daemon at once: nothing here is worth draining.
        for _ in range(2):
            for child in living_children:
                if child.poll() is None:
                    child.send_signal(signal.SIGTERM)
        give_up_at_s = time.monotonic() + END_WITHIN_S
        for child in living_children:
            try:
                child.wait(max(0.0, give_up_at_s - time.monotonic()))
            except subprocess.TimeoutExpired:
                continue
        for child in list(self._living):
            self.kill(child)

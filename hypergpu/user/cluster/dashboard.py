"""The dashboard as a child process: its command line and the link that it prints."""

import subprocess
import threading
from pathlib import Path

import msgspec

from hypergpu.command_line import program
from hypergpu.leash import leash_command
from hypergpu.privacy import variables_of
from hypergpu.user.cluster.cluster import ReadyLine
from hypergpu.user.cluster.processes import kill_group, start


class DashboardLine(msgspec.Struct, frozen=True):
    """The line a dashboard prints: where it is, or why it will not serve."""

    link: str = ""
    """Address of the page with a one-time code."""
    detail: str = ""
    fix: str = ""


class DashboardProcess:
    """A dashboard beside a coordinator of this machine; it dies with whoever started it.

    Args:
        ready: The coordinator.
        data_dir: The coordinator's folder; the dashboard's is within.
        port: Port of the page; None: the usual one, or a free one where that is taken.
    """

    def __init__(self, ready: ReadyLine, data_dir: Path, port: int | None) -> None:
        folder = data_dir / "dashboard"
        flags = ["--takes-any-port"] if port is None else ["--port", str(port)]
        command = program(
            "dashboard_api",
            *("--data-dir", str(folder), "--coordinator-data-dir", str(data_dir)),
            *("--coordinator", ready.address, "--token-file", ready.operator_token_file),
            *flags,
        )
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._line = DashboardLine()
        self.log = folder / "dashboard.log"
        """What it says of its calls and failures."""
        own = variables_of("HYPERGPU_DASHBOARD_")
        self._child = start(leash_command(command), log=self.log, is_read=True, environment=own)
        self._has_said = threading.Event()
        threading.Thread(target=self._read, daemon=True).start()

    def wait_for_line(self, within_s: float) -> DashboardLine:
        """What it said of itself; empty when it has said nothing yet."""
        self._has_said.wait(within_s)
        return self._line

    def end(self) -> None:
        """End it at once: it holds nothing that matters."""
        kill_group(self._child)
        if self._child.stdout is not None:
            self._child.stdout.close()

    @property
    def child(self) -> "subprocess.Popen[str]":
        """The process."""
        return self._child

    def _read(self) -> None:
        for line in self._child.stdout or ():
            try:
                self._line = msgspec.json.decode(line, type=DashboardLine)
            except (msgspec.DecodeError, msgspec.ValidationError):
                continue
            break
        self._has_said.set()

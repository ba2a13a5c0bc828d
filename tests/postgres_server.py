"""A PostgreSQL of a test's own, which ends at once and comes back with what it had committed."""

import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Self

from benchmarks.ours.demo.postgresql import OWNER, server_programs
from hypergpu.wire.free_ports import free_ports


class RestartablePostgres:
    """The server, on loopback. Started again it keeps its port and its data."""

    def __init__(self) -> None:
        """Make an empty database; nothing runs yet."""
        self._programs = server_programs()
        self._owner = OWNER if os.geteuid() == 0 else ""
        # Not below the test's folder: only the test's user may look into that.
        self._folder = Path(tempfile.mkdtemp(prefix="hypergpu-postgres-"))
        if self._owner:
            shutil.chown(self._folder, self._owner)
        (self.port,) = free_ports(1)
        cluster = str(self._folder / "cluster")
        self._control = (str(self._programs / "pg_ctl"), "--pgdata", cluster, "--wait")
        options = ("--auth=trust", "--username=postgres", "--no-sync", "--pgdata", cluster)
        self._run(str(self._programs / "initdb"), *options)

    def url(self, port: int = 0) -> str:
        """Its address, or that of a port that leads to it."""
        return f"postgresql://postgres@127.0.0.1:{port or self.port}/postgres"

    def start(self) -> None:
        """Start it and wait until it takes calls."""
        options = f"-p {self.port} -k {self._folder} -c listen_addresses=127.0.0.1 -c fsync=off"
        self._run(*self._control, "--log", str(self._folder / "log"), "-o", options, "start")

    def stop(self) -> None:
        """End it at once, as when its machine fails."""
        self._run(*self._control, "--mode=immediate", "stop")

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        raised: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if (self._folder / "cluster" / "postmaster.pid").exists():
            self.stop()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _run(self, *command: str) -> None:
        """PostgreSQL refuses to run as root."""
        prefix = ["runuser", "-u", self._owner, "--"] if self._owner else []
        subprocess.run([*prefix, *command], check=True, stdout=subprocess.DEVNULL, cwd="/")

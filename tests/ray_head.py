"""A Ray of a test's own, in a process group of its own, whose head can be killed."""

import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path

from hypergpu.wire.free_ports import free_ports

CPUS = 2
_START_S = 240.0
_LOOK_EVERY_S = 0.1


class RayHead:
    """`ray start --head` with two CPUs and a GPU that is none."""

    def __init__(self) -> None:
        self._ports = free_ports(2)
        # Sockets below it: their paths are short.
        self._folder = tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True)
        self._process: subprocess.Popen[str] | None = None

    @property
    def address(self) -> str:
        """For `RayEngine`."""
        return f"ray://127.0.0.1:{self._ports[1]}"

    def start(self) -> None:
        """Start it, again after it was killed, and wait until it takes drivers."""
        head, client = self._ports
        options = {
            "port": head,
            "ray-client-server-port": client,
            "num-cpus": CPUS,
            "num-gpus": 1,
            "object-store-memory": 100_000_000,
            "include-dashboard": "false",
            "temp-dir": self._folder.name,
        }
        flags = [f"--{name}={value}" for name, value in options.items()]
        ray = str(Path(sys.executable).with_name("ray"))
        self._process = subprocess.Popen(
            [ray, "start", "--head", "--block", "--disable-usage-stats", *flags],
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        assert self._process.stdout is not None
        output_lines = iter(self._process.stdout)
        assert any("block forever" in line for line in output_lines), "Ray did not start"
        give_up_s = time.monotonic() + _START_S
        while not _is_open(client):
            assert time.monotonic() < give_up_s, "Ray takes no drivers"
            threading.Event().wait(_LOOK_EVERY_S)

    def kill(self) -> None:
        """SIGKILL head, node and workers, all at once."""
        process, self._process = self._process, None
        if process is not None:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.communicate()

    def close(self) -> None:
        """Kill it, and delete what it wrote."""
        self.kill()
        self._folder.cleanup()


def _is_open(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port)).close()
    except ConnectionRefusedError:
        return False
    return True

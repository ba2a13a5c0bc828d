"""Flower as it asks to be deployed: a SuperLink, one SuperNode a node, apps started by them."""

import argparse
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


def processes(address: str, nodes: int) -> list[list[str]]:
    """Return the commands of the hub and the nodes."""
    _, _, port = address.partition(":")
    hub_options = ["--host", LOOPBACK, "--port", port, "--disable-runtime-dependency-installation"]
    hub = program("flower-superlink", *hub_options)
    node_options = ["--superlink", address, "--host", LOOPBACK, "--port"]
    return [
        hub,
        *(program("flower-supernode", *node_options, str(free_port())) for _ in range(nodes)),
    ]


def start_run(options: argparse.Namespace, app: Path, ends_path: Path) -> None:
    """Hand the app to the hub, again until the hub answers."""
    settings = (
        f"parameters={options.parameters} nodes={options.nodes} "
        f'rounds={options.rounds + WARM_UP_ROUNDS} ends-path="{ends_path}"'
    )
    command = [str(PROGRAMS / "flwr"), "run", str(app), "hub", "--run-config", settings]
    give_up_at_s = time.monotonic() + 60
    while subprocess.run(command, check=False, stdout=sys.stderr).returncode:
        if time.monotonic() > give_up_at_s:
            raise TimeoutError("the SuperLink accepted no run within 60 s")
        time.sleep(1)


def wait_for_rounds(ends_path: Path, rounds: int) -> list[float]:
    """Return when each round ended, once all have."""
    give_up_at_s = time.monotonic() + DEADLINE_S
    while time.monotonic() < give_up_at_s:
        lines = ends_path.read_text(encoding="utf-8").splitlines() if ends_path.exists() else []
        if len(lines) >= rounds:
            return [float(json.loads(line)) for line in lines]
        time.sleep(POLL_S)
    raise TimeoutError(f"the rounds did not end within {DEADLINE_S} s")


def main() -> None:
    """Start hub and nodes, run the app, report its rounds."""
    options = arguments()
    address = f"{LOOPBACK}:{free_port()}"
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        (home / "config.toml").write_text(CONNECTION.format(address=address), encoding="utf-8")
        shutil.copytree(APP, home / "app", ignore=shutil.ignore_patterns("__pycache__"))
        os.environ["FLWR_HOME"] = folder
        os.environ["PATH"] = f"{PROGRAMS}{os.pathsep}{os.environ['PATH']}"
        ends_path = home / "ends"
        with running(processes(address, options.nodes), cwd=folder):
            start_run(options, home / "app", ends_path)
            report(wait_for_rounds(ends_path, options.rounds + WARM_UP_ROUNDS))


if __name__ == "__main__":
    main()

"""Flower's FedAvg training a real network over netsim's links or loopback: its deployment.

A SuperLink runs at the coordinator's end and a SuperNode at each node's; they start the apps.
"""

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.peers.flower_deployed import (
    prepare,
    start_run,
    superlink,
    supernode,
    wait_for_lines,
)
from benchmarks.peers.flower_task import FlowerTraining, HubEnds, ends, task_of
from benchmarks.peers.measured import running

ROOT = Path(__file__).parents[2]
APP = Path(__file__).parent / "flower_trained_app"
LIMIT_S = 1500


def commands(found: HubEnds, home: Path) -> list[list[str]]:
    """What starts the hub and the nodes, which share nothing but what they send."""
    nodes = []
    for rank, (prefix, address) in enumerate(found.nodes):
        own = home / f"node-{rank}"
        own.mkdir()
        command = supernode(address, "--node-config", f"rank={rank}")
        nodes.append([*prefix, "env", f"FLWR_HOME={own}", *command])
    return [superlink(found.hub), *nodes]


def outcome(training: FlowerTraining, home: Path, lines: list[str]) -> dict[str, Any]:
    """When each round ended since the first was opened, and how good its model is."""
    ends_s, updates = zip(*map(json.loads, lines), strict=True)
    models = [(home / f"{number}.f32").read_bytes() for number in range(1, len(lines) + 1)]
    metrics = [training.accuracy(np.frombuffer(each, np.float32)) for each in models]
    return {"ends_s": ends_s, "metrics": metrics, "updates": updates}


def main() -> None:
    """Start hub and nodes, run the app, tell of its rounds."""
    task, _ = task_of(sys.argv[1:])
    training = FlowerTraining(task)
    hub_ends = ends(training.spec.training.nodes)
    # The apps import what they train from here.
    os.environ["PYTHONPATH"] = str(ROOT)
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        app = prepare(home, APP, hub_ends.hub)
        settings = home / "settings.toml"
        task_text = json.dumps(json.dumps(task._asdict()))
        settings.write_text(f'task = {task_text}\nfolder = "{home}"\n', encoding="utf-8")
        with running(commands(hub_ends, home), cwd=folder):
            start_run(app, str(settings))
            lines = wait_for_lines(home / "rounds", task.rounds, limit_s=LIMIT_S)
        print(json.dumps(outcome(training, home, lines)), flush=True)


if __name__ == "__main__":
    main()

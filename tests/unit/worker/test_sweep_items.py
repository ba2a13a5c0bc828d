"""Points of a sweep, against plain torch with the same settings."""

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from gpu_node.shell.worker.trainer import ShardError
from hypergpu.farm.bundle_results import ItemResult
from hypergpu.farm.folder_index import FolderIndex, index_bytes
from hypergpu.farm.sweep_points import SWEEP_DATA, SweepPoint, steps_of
from hypergpu.jobfile.reading import parse_job
from hypergpu.partitions import permutation
from hypergpu.workloads.digits import digits
from hypergpu.workloads.registry import build, find
from tests.bundles import BundleFolder

JOB = """
workload = "digits-mlp"
[options]
width = 32
[training]
rounds = 4
inner_steps = 10
batch_size = 64
seed = 5
[inner]
optimizer = "adamw"
learning_rate = 0.01
schedule = "cosine"
[evaluation]
every = 2
"""


def item_of(job: str = JOB, steps: int = 0, version: int = 0, **point: Any) -> dict[str, Any]:
    spec = parse_job(job)
    values: dict[str, Any] = {"inner": msgspec.structs.replace(spec.inner, **point)}
    spec = msgspec.structs.replace(spec, **values)
    entry = find(spec.workload)
    sweep_point = SweepPoint(
        point={f"inner.{name}": value for name, value in point.items()},
        spec=spec,
        workload_version=version or entry.version,
        steps=steps or steps_of(spec),
    )
    plain: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(sweep_point))
    return plain


def results_of(folder: Path, *items: Any, **parameters: Any) -> list[ItemResult]:
    bundles = BundleFolder(folder, "sweep")
    bundles.add_items(items)
    workload = next(item["spec"]["workload"] for item in items if item)
    return bundles.values(**{"workload": workload, **parameters})


def plain_training(learning_rate: float, steps: int) -> tuple[float, float]:
    """Held-out loss and accuracy of a loop as one writes it."""
    torch.manual_seed(5)
    model: nn.Module = build(find("digits-mlp"), {"width": 32}).model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, weight_decay=0.01)
    train, test, _ = digits()
    count = len(train.labels)
    order = np.concatenate([permutation(5, 0, number, count) for number in range(4)])
    for step in range(steps):
        inputs, targets = train.batch(order[64 * step : 64 * step + 64])
        progress = 64 * (step + 1) / (64 * 40)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate * 0.5 * (1 + np.cos(np.pi * progress))
        optimizer.zero_grad()
        F.cross_entropy(model(torch.from_numpy(inputs)), torch.from_numpy(targets)).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    inputs, targets = test.batch(np.arange(len(test.labels)))
    with torch.inference_mode():
        logits = model(torch.from_numpy(inputs))
    loss = F.cross_entropy(logits, torch.from_numpy(targets))
    hits = logits.argmax(1) == torch.from_numpy(targets)
    return float(loss), float(hits.float().mean())


def test_a_point_is_the_training_that_plain_torch_does(tmp_path: Path) -> None:
    results = results_of(
        tmp_path, item_of(learning_rate=0.02), item_of(learning_rate=0.02, steps=20)
    )
    for result, steps in zip(results, (40, 20), strict=True):
        loss, accuracy = plain_training(0.02, steps)
        assert result.value["metric"] == pytest.approx(loss, rel=1e-4)
        assert result.value["metrics"] == pytest.approx(
            {"loss": loss, "accuracy": accuracy}, rel=1e-4
        )
        assert result.value["steps"] == steps
        assert result.value["point"] == {"inner.learning_rate": 0.02}
    whole, part = (result.value["curve"] for result in results)
    assert [each["step"] for each in whole] == [0, 20, 40]
    assert part == whole[:2]
    assert whole[-1]["value"] < whole[0]["value"] / 2


def test_the_same_points_give_the_same_bytes_and_count_their_samples(tmp_path: Path) -> None:
    bundles = BundleFolder(tmp_path, "sweep")
    bundles.add_items([item_of(learning_rate=0.01), item_of(learning_rate=0.03)])
    first, second = (bundles.perform(workload="digits-mlp") for _ in range(2))
    assert first[1] == second[1]
    assert first[0].units == 2 * 40 * 64
    assert bundles.progress


def test_a_point_that_diverges_is_told_by_itself(tmp_path: Path) -> None:
    good, bad, empty = results_of(
        tmp_path,
        item_of(learning_rate=0.01, optimizer="sgd"),
        item_of(learning_rate=100.0, weight_decay=10.0, optimizer="sgd"),
        None,
    )
    assert good.value["metric"] < 2.4
    assert "is no finite number after" in bad.error
    assert "Fix: lower inner.learning_rate" in bad.error
    assert empty.error == "the row is no point"


def test_points_are_compared_by_a_metric_that_the_workload_has(tmp_path: Path) -> None:
    (result,) = results_of(tmp_path, item_of(), metric="accuracy")
    assert result.value["metric"] == result.value["metrics"]["accuracy"] > 0.5
    (without,) = results_of(tmp_path / "other", item_of(), metric="bleu")
    assert without.error == "there is no metric 'bleu'. Fix: take one of accuracy, loss"


def test_a_workload_without_torch_is_trained_too(tmp_path: Path) -> None:
    job = JOB.replace("digits-mlp", "digits-softmax").replace("width = 32", "")
    (result,) = results_of(tmp_path, item_of(job, learning_rate=0.05))
    assert result.value["metric"] < 0.6


def test_a_sweep_reads_the_users_own_data(tmp_path: Path) -> None:
    job = """
    workload = "text-gpt"
    options = { width = 16, layers = 1, heads = 1, block_length = 16 }
    data.path = "data"
    training = { rounds = 1, inner_steps = 5, batch_size = 4 }
    """
    bundles = BundleFolder(tmp_path, "sweep")
    text = b"one two three four five six seven eight nine ten\n" * 1000
    index = FolderIndex(small_files={"a.txt": text[:9000]}, large_files={"more/b.txt": "data-0"})
    bundles.add_file("data-0", text)
    bundles.add_file(SWEEP_DATA, index_bytes(index))
    bundles.add_items([item_of(job)])
    (result,) = bundles.values(workload="text-gpt")
    assert 0 < result.value["metric"] < 6
    without = BundleFolder(tmp_path / "without", "sweep")
    without.add_items([item_of(job)])
    with pytest.raises(ShardError, match="has no file 'data', which names its data"):
        without.perform(workload="text-gpt")


def test_a_point_of_another_workload_than_owners_were_told_is_given_back(tmp_path: Path) -> None:
    with pytest.raises(ShardError, match="another workload than the sweep states"):
        results_of(tmp_path, item_of(), workload="digits-cnn")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"workload_version": 9}, "Fix: upgrade the older side"),
        ({"steps": 0}, "the point takes 0 inner steps: 1 to 40 are possible"),
        ({"spec": {"workload": "digits-mlp", "color": 3}}, "it is no point|is no point of a sweep"),
        ({"spec": {"workload": "no-such"}}, "no workload 'no-such'"),
    ],
)
def test_what_only_another_version_can_train_is_given_back(
    tmp_path: Path, change: dict[str, Any], reason: str
) -> None:
    with pytest.raises(ShardError, match=reason):
        results_of(tmp_path, {**item_of(), **change})

"""What trained classifiers and programs say of a few rows: by real nodes, as libraries have it."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pytest
import torch
import transformers
from pyarrow import parquet
from torch import Tensor, nn
from torch.nn import functional as F

import hypergpu
from hypergpu.errors import HyperGPUError
from hypergpu.user.client import Coordinator
from hypergpu.wire.credentials import Role
from tests.processes import Cluster
from tests.tiny_bases import save_base, save_encoder
from tests.warm_commands import command_output
from tests.whole_set import digits_metrics, digits_parts

TEXTS = ["number 3 comes", "which is what", "counting means"]
pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing")  # peft reads it


@pytest.fixture(scope="module")
def coordinator(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Coordinator]:
    """A connection to one with a node."""
    with Cluster(tmp_path_factory.mktemp("predict"), is_plaintext=False) as cluster:
        cluster.add_nodes(1, "torch", kinds=("training", "classify", "program"))
        with cluster.coordinator.client() as client:
            yield client


def labels_by_transformers(folder: Path, texts: list[str]) -> list[tuple[str, float]]:
    """Label and share of each text."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForSequenceClassification.from_pretrained(folder).eval()
    labels = []
    for text in texts:
        with torch.inference_mode():
            shares = model(**tokenizer(text, return_tensors="pt")).logits[0].softmax(0)
        place = int(shares.argmax())
        labels.append((model.config.id2label[place], float(shares[place])))
    return labels


def output_of(coordinator: Coordinator, *words: str) -> list[Any]:
    """Rows that the command says."""
    token = coordinator.create_token(Role.OPERATOR, ttl_s=600).token
    variables = {"HYPERGPU_TOKEN": token}
    output = command_output("predict", *words, "--json", environment=variables)
    return [msgspec.json.decode(line) for line in output.splitlines()]


def test_the_command_labels_texts_as_transformers_does(
    coordinator: Coordinator, tmp_path: Path
) -> None:
    base = save_encoder(tmp_path / "base", labels=3)
    words = [word for text in TEXTS for word in ("--text", text)]
    rows = output_of(coordinator, str(base), *words)
    wanted_labels = labels_by_transformers(base, TEXTS)
    assert [row["label"] for row in rows] == [label for label, _ in wanted_labels]
    np.testing.assert_allclose(
        [row["score"] for row in rows], [share for _, share in wanted_labels], atol=1e-5
    )


class Classes(nn.Module):
    """A layer over the pixels of a digit."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 10)

    def forward(self, image: Tensor) -> Tensor:
        logits: Tensor = self.linear(image)
        return logits


def loss(model: nn.Module, batch: Mapping[str, Tensor]) -> Any:
    logits = model(batch["image"])
    value = F.cross_entropy(logits, batch["digit"])
    if model.training:
        return value
    outputs = {"scores": logits.softmax(1), "digit": batch["digit"]}
    return value, {"error": value}, outputs


def test_a_program_gives_its_output_of_rows_without_targets(
    coordinator: Coordinator, tmp_path: Path
) -> None:
    train, test = digits_parts()
    torch.manual_seed(0)
    run = hypergpu.train(
        Classes(),
        loss=loss,
        evaluate_all=digits_metrics,
        data=train,
        held_out=test,
        coordinator=coordinator,
        nodes=1,
        rounds=1,
        inner_steps=20,
        learning_rate=0.01,
    )
    run.result()
    trained_module = Classes()
    trained_module.load_state_dict(run.state_dict())
    images = test["image"][:7]
    logits = trained_module(torch.from_numpy(images)).detach()
    scores = run.predict({"image": images})
    np.testing.assert_allclose(scores, logits.softmax(1).numpy(), atol=1e-5)
    outputs = run.predict({"image": images}, module=Classes())
    np.testing.assert_allclose(outputs, logits.numpy(), atol=1e-5)
    path = tmp_path / "rows.parquet"
    parquet.write_table(pa.table({"image": list(images)}), path)
    rows = output_of(coordinator, run.id, str(path))
    np.testing.assert_allclose([row["output"] for row in rows], scores, atol=1e-6)
    with pytest.raises(HyperGPUError, match="the output digit needs the field 'digit'"):
        run.predict({"image": images}, output="digit")
    with pytest.raises(HyperGPUError, match="has no output 'colour'"):
        run.predict({"image": images}, output="colour")


@pytest.mark.full
def test_a_fine_tuned_classifier_labels_as_its_merged_export(
    coordinator: Coordinator, tmp_path: Path
) -> None:
    base = save_encoder(tmp_path / "base")
    rows = [{"text": f"number {n}", "label": "odd" if n % 2 else "even"} for n in range(40)]
    run = hypergpu.finetune(
        base,
        workload="hf-text-classifier",
        data=rows,
        coordinator=coordinator,
        steps=6,
        inner_steps=3,
        options={"labels": "even,odd", "sequence_length": 32},
    )
    run.result()
    frame = run.predict(TEXTS)
    run.save(tmp_path / "export")
    wanted_labels = labels_by_transformers(tmp_path / "export" / "merged", TEXTS)
    assert list(frame["label"]) == [label for label, _ in wanted_labels]
    np.testing.assert_allclose(frame["score"], [share for _, share in wanted_labels], atol=1e-4)


def test_a_model_that_writes_texts_is_sent_to_serve(
    coordinator: Coordinator, tmp_path: Path
) -> None:
    run = hypergpu.finetune(
        save_base(tmp_path),
        data=[{"prompt": f"{n} and", "completion": f" {n + 1}"} for n in range(40)],
        coordinator=coordinator,
        steps=1,
        options={"sequence_length": 32, "packing": False},
    )
    with pytest.raises(HyperGPUError, match=f"hypergpu serve {run.id}"):
        run.predict(TEXTS)
    run.stop()

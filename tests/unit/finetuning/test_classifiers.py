"""Classifiers of texts and images: a head beside the adapter, trained and saved with it."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from PIL import Image
from safetensors.numpy import save_file

from hypergpu.tensors.layout import Flat, unpack
from hypergpu.workloads.datasets import DatasetError
from hypergpu.workloads.entry import OPTIONS_FIELD, WORKLOAD_FIELD, Options, OptionValue
from hypergpu.workloads.finetuning.export import write_folders
from hypergpu.workloads.networks.task import module_layout, named_tensors, store_module
from hypergpu.workloads.registry import build_for_job, find
from tests.tiny_bases import trained_tokenizer

SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
}


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    """Texts that say yes or no, and a BERT without a head."""
    tokenizer = trained_tokenizer()
    torch.manual_seed(0)
    config = transformers.BertConfig(vocab_size=len(tokenizer), max_position_embeddings=64, **SIZES)
    transformers.BertModel(config).save_pretrained(tmp_path / "base")
    tokenizer.save_pretrained(tmp_path / "base")
    rows = [
        {"text": f"number {n} {'comes' if n % 2 else 'counts'}", "label": ["no", "yes"][n % 2]}
        for n in range(60)
    ]
    lines = "\n".join(map(json.dumps, rows))
    (tmp_path / "rows.jsonl").write_text(lines, encoding="utf-8")
    return tmp_path


@pytest.fixture
def images(tmp_path: Path) -> Path:
    """Bright and dark images, and a ViT without a head."""
    torch.manual_seed(0)
    config = transformers.ViTConfig(image_size=16, patch_size=4, **SIZES)
    transformers.ViTModel(config).save_pretrained(tmp_path / "base")
    for name, level in (("bright", 220), ("dark", 30)):
        (tmp_path / "images" / name).mkdir(parents=True)
        for number in range(12):
            image = Image.new("RGB", (16, 16), (level, level - number, level))
            image.save(tmp_path / "images" / name / f"{number}.png")
    return tmp_path


def train(workload: Any, folder: Path, steps: int) -> torch.nn.Module:
    samples = workload.load(str(folder)).train
    model: torch.nn.Module = workload.model().train()
    trained_parameters = [each for each in model.parameters() if each.requires_grad]
    optimizer = torch.optim.AdamW(trained_parameters, lr=0.01)
    fields = [torch.from_numpy(each) for each in samples.batch(np.arange(len(samples.labels)))]
    for _ in range(steps):
        optimizer.zero_grad()
        workload.loss(model, *fields).backward()
        optimizer.step()
    return model.eval()


def export(model: torch.nn.Module, name: str, options: Options, folder: Path) -> Path:
    """Write a model as `hypergpu job export` does."""
    layout = module_layout(model)
    flat = Flat.empty(layout)
    store_module(model, layout, flat)
    folder.mkdir()
    metadata = {WORKLOAD_FIELD: name, OPTIONS_FIELD: json.dumps(options)}
    save_file(unpack(layout, flat), folder / "model.safetensors", metadata)
    return folder


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing")
def test_a_text_classifier_learns_and_loads_without_us(texts: Path) -> None:
    options: dict[str, OptionValue] = {"labels": "no,yes", "sequence_length": 16}
    workload = build_for_job(find("hf-text-classifier"), options, str(texts))
    model = train(workload, texts, 40)
    assert any("classifier" in name for name in named_tensors(model))
    held_out = workload.load(str(texts)).test
    fields = [torch.from_numpy(each) for each in held_out.batch(np.arange(len(held_out.labels)))]
    with torch.inference_mode():
        sums = workload.evaluate(model, *fields)
        assert sums.metric("accuracy") > 0.9
        folder = export(model, "hf-text-classifier", options, texts / "export")
        merged_folder = write_folders(folder, str(texts)).merged
        plain = transformers.AutoModelForSequenceClassification.from_pretrained(
            merged_folder
        ).eval()
        logits = plain(input_ids=fields[0].long(), attention_mask=fields[1].long()).logits
    assert torch.allclose(logits, workload.logits(model, *fields[:2]), atol=1e-4)
    assert plain.config.id2label == {0: "no", 1: "yes"}


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing")
def test_an_image_classifier_learns_and_loads_without_us(images: Path) -> None:
    options = {"labels": "bright,dark"}
    workload = build_for_job(find("hf-image-classifier"), options, str(images))
    model = train(workload, images, 20)
    pictures = workload.load(str(images)).test.batch(np.arange(2))
    fields = [torch.from_numpy(each) for each in pictures]
    with torch.inference_mode():
        assert workload.evaluate(model, *fields).metric("accuracy") == 1.0
        folder = export(model, "hf-image-classifier", options, images / "export")
        merged_folder = write_folders(folder, str(images)).merged
        plain = transformers.AutoModelForImageClassification.from_pretrained(merged_folder).eval()
        logits = plain(pixel_values=fields[0].float() / 127.5 - 1).logits
    assert torch.allclose(logits, workload.logits(model, fields[0]), atol=1e-4)
    assert workload.outputs(model, fields[0]) == fields[1].tolist()


def test_heads_are_drawn_alike_on_every_node(texts: Path) -> None:
    workload = build_for_job(
        find("hf-text-classifier"), {"labels": "no,yes", "sequence_length": 64}, str(texts)
    )
    models = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        models.append(named_tensors(workload.model()))
    assert all(torch.equal(models[0][name][1], models[1][name][1]) for name in models[0])


@pytest.mark.parametrize(
    ("labels", "said"),
    [
        ("no", "two names or more"),
        ("no,no", "two names"),
        ("a,b", r"row 1 has the label .no., and the classes are a, b, or their numbers 0 to 1"),
    ],
)
def test_labels_that_do_not_fit_are_named(texts: Path, labels: str, said: str) -> None:
    options: dict[str, OptionValue] = {"labels": labels, "sequence_length": 64}
    with pytest.raises(DatasetError, match=said):
        build_for_job(find("hf-text-classifier"), options, str(texts)).load(str(texts))

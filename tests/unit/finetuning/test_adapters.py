"""Adapters of small models: alike on every node, blind between rows, bound to their base."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hypergpu.optimizer import OptimizerRule
from hypergpu.workloads.datasets import DatasetError
from hypergpu.workloads.entry import OptionError
from hypergpu.workloads.finetuning.rows import base_digest
from hypergpu.workloads.networks.hidden_weights import hidden_weights
from hypergpu.workloads.networks.task import module_initial, module_layout, named_tensors
from tests.base_steps import causal_lm, step_taken
from tests.tiny_bases import save_base, write_chats


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A job's folder with a Llama and chats."""
    folder = tmp_path_factory.mktemp("llama")
    save_base(folder)
    write_chats(folder)
    return folder


def test_drawn_numbers_are_fixed_for_all_time() -> None:
    from hypergpu.workloads.finetuning.adapters import uniform_numbers

    numbers = uniform_numbers(7, "layer.lora_A", (2, 2))
    assert numbers.dtype == np.float32
    assert numbers.tolist() == uniform_numbers(7, "layer.lora_A", (2, 2)).tolist()
    assert numbers.tolist() != uniform_numbers(7, "layer.lora_B", (2, 2)).tolist()
    assert np.abs(numbers).max() < 1


def test_mode_b_trains_b_alone_from_the_same_a_on_every_node(job: Path) -> None:
    workload = causal_lm(job)
    torch.manual_seed(1)
    first = workload.model()
    torch.manual_seed(2)
    second = workload.model()
    states = [dict(each.named_parameters()) for each in (first, second)]
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
    names = [name for name in named_tensors(first) if not name.startswith("base_")]
    assert names
    assert all("lora_B" in name for name in names)
    both = named_tensors(causal_lm(job, mode="full").model())
    assert len(both) == 2 * len(names) + 1


@pytest.mark.parametrize("mode", ["b", "full"])
def test_factors_of_an_adapter_are_no_hidden_weights(job: Path, mode: str) -> None:
    model = causal_lm(job, mode=mode).model()
    assert hidden_weights(model) == frozenset()
    rules = [OptimizerRule(name=name, epsilon=1e-3) for name in ("muon", "adamw")]
    ours, plain = (step_taken(causal_lm(job, mode=mode), job, rule)[0] for rule in rules)
    assert np.array_equal(ours, plain)


def test_another_seed_draws_another_a(job: Path) -> None:
    parameters = [
        next(
            p for n, p in causal_lm(job, adapter_seed=seed).model().named_parameters() if "_A" in n
        )
        for seed in (0, 1)
    ]
    assert not torch.equal(*parameters)


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_a_packed_row_costs_what_it_costs_alone(tmp_path: Path, kind: str) -> None:
    save_base(tmp_path, kind)
    write_chats(tmp_path)
    sums = []
    for packing in (True, False):
        workload = causal_lm(tmp_path, packing=packing)
        samples = workload.load(str(tmp_path)).train
        fields = samples.batch(np.arange(len(samples.labels)))
        with torch.inference_mode():
            model = workload.model().eval()
            sums.append(workload.evaluate(model, *map(torch.from_numpy, fields)))
    assert sums[0].samples == sums[1].samples
    assert sums[0].loss == pytest.approx(sums[1].loss, rel=1e-5)


def test_the_layout_names_the_base_and_another_base_is_refused(job: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(job, other)
    config = other / "base" / "config.json"
    settings = json.loads(config.read_text())
    config.write_text(json.dumps({**settings, "rms_norm_eps": 1e-3}))
    layouts = [module_layout(causal_lm(each).model()).digest for each in (job, other)]
    assert layouts[0] != layouts[1]
    digest = base_digest(job / "base")
    causal_lm(job, base_digest=digest)
    with pytest.raises(DatasetError, match=r"the job's is .* Fix: give the job the base"):
        causal_lm(other, base_digest=digest)


def test_first_models_are_the_base_itself(job: Path) -> None:
    flat = module_initial(causal_lm(job).model, seed=5)
    assert not flat.parameters.any()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("auto_map", "names code of its own"),
        ("bin", r"holds no \*\.safetensors"),
        ("absent", "there is no base/config.json"),
        ("tensors", "lacks"),
    ],
)
def test_bases_that_would_run_code_or_lack_parts_are_refused(
    job: Path, tmp_path: Path, change: str, said: str
) -> None:
    folder = tmp_path / "job"
    shutil.copytree(job, folder)
    base = folder / "base"
    settings = json.loads((base / "config.json").read_text())
    if change == "auto_map":
        settings["auto_map"] = {"AutoModelForCausalLM": "model.Own"}
    if change == "tensors":
        settings["num_hidden_layers"] = 3
    (base / "config.json").write_text(json.dumps(settings))
    if change == "bin":
        (base / "model.safetensors").rename(base / "pytorch_model.bin")
    if change == "absent":
        shutil.rmtree(base)
    with pytest.raises(DatasetError, match=said):
        causal_lm(folder).model()


@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        ({"mode": "a"}, OptionError, "must be b or full"),
        ({"targets": "nothing"}, DatasetError, r"options\.targets: .*nothing"),
        ({"sequence_length": 4096}, DatasetError, r"set options\.sequence_length = 128"),
        ({"base_dtype": "4bit"}, DatasetError, r"pip install 'hypergpu\[hf4bit\]'"),
    ],
)
def test_options_that_do_not_fit_are_named(
    job: Path, options: dict[str, Any], error: type[Exception], said: str
) -> None:
    with pytest.raises(error, match=said):
        causal_lm(job, **options).model()


@pytest.mark.parametrize("micro_batch", [1, 3])
def test_a_batch_in_parts_of_unequal_length_gives_the_step_of_the_whole(
    tmp_path: Path, micro_batch: int
) -> None:
    save_base(tmp_path)
    rows = [{"text": " ".join(str(n) for n in range(1 + n * n))} for n in range(7)]
    (tmp_path / "train.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    (tmp_path / "held_out.jsonl").write_text(json.dumps(rows[0]), encoding="utf-8")
    workload = causal_lm(tmp_path, packing=False)
    counts = [workload.loss_count(*workload.load(str(tmp_path)).train.batch([n])) for n in range(7)]
    assert max(counts) > 8 * min(counts)
    whole, whole_loss = step_taken(workload, tmp_path, OptimizerRule(name="sgd"))
    rule = OptimizerRule(name="sgd", micro_batch=micro_batch)
    parts, parts_loss = step_taken(workload, tmp_path, rule)
    assert parts_loss == pytest.approx(whole_loss, rel=1e-5)
    np.testing.assert_allclose(parts, whole, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_activations_that_are_computed_again_give_the_same_step(tmp_path: Path, kind: str) -> None:
    save_base(tmp_path, kind)
    write_chats(tmp_path)
    workload, rule = causal_lm(tmp_path), OptimizerRule(name="sgd")
    model, runs = workload.model().train(), []
    model.checkpoint_activations(is_on=True)
    layers = [each for name, each in model.named_modules() if name.endswith(".0.mlp")]
    layers[0].register_forward_pre_hook(lambda *_: runs.append(1))
    fields = workload.load(str(tmp_path)).train.batch(np.arange(2))
    workload.loss(model, *map(torch.from_numpy, fields)).backward()
    assert len(runs) == 2
    kept_step = step_taken(workload, tmp_path, rule)
    again = step_taken(workload, tmp_path, OptimizerRule(name="sgd", checkpoints_activations=True))
    assert kept_step[1] == again[1]
    assert np.array_equal(kept_step[0], again[0])

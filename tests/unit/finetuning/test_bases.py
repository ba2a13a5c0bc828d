"""Bases of many kinds: packed as alone, merged as its adapter, measured as by plain transformers;
or refused in a sentence of our own.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from benchmarks.ours.workloads.base_kinds import ALL, BaseKind, word_tokenizer
from benchmarks.ours.workloads.bases import TOLERANCE, try_base, write_samples
from hypergpu.workloads.datasets import DatasetError
from hypergpu.workloads.entry import OptionValue
from hypergpu.workloads.networks.task import named_tensors
from hypergpu.workloads.registry import build_for_job, find

pytestmark = pytest.mark.filterwarnings("ignore")  # transformers' advice on kernels
KINDS = {kind.name: kind for kind in ALL}
_SIZES: dict[str, Any] = {
    "vocab_size": 400,
    "d_model": 32,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
}


def save_job(kind: BaseKind, job: Path) -> Path:
    kind.save(job / "base")
    write_samples(kind, job)
    return job


def workload(job: Path, name: str = "hf-causal-lm", **options: OptionValue) -> Any:
    return build_for_job(find(name), {"sequence_length": 64, **options}, str(job))


@pytest.mark.parametrize(
    ("name", "is_packed"),
    [("Llama, tied", True), ("OPT", True), ("Lfm2", False), ("Bloom", False)],
)
def test_a_base_trains_packs_and_merges_as_plain_transformers_would(
    name: str, is_packed: object
) -> None:
    outcome = try_base(KINDS[name])
    assert outcome.is_right, outcome
    assert outcome.is_packed is is_packed


@pytest.mark.parametrize("name", ["Roberta", "DebertaV2", "ResNet"])
def test_a_classifier_trains_and_merges_as_plain_transformers_would(name: str) -> None:
    assert try_base(KINDS[name]).is_right


@pytest.mark.full
@pytest.mark.parametrize("name", sorted(KINDS))
def test_every_kind_of_base_is_right(name: str) -> None:
    assert try_base(KINDS[name]).is_right


@pytest.mark.parametrize("targets", ["q_proj,lm_head", "q_proj,embed_tokens"])
def test_an_adapter_of_a_tied_tensor_merges_into_a_tensor_of_its_own(targets: str) -> None:
    outcome = try_base(KINDS["Llama, tied"], targets=targets)
    assert outcome.merged_off <= TOLERANCE
    assert outcome.loss_last < outcome.loss_first


def test_an_embedding_is_adapted_as_other_layers_are(tmp_path: Path) -> None:
    adapter_workload = workload(save_job(KINDS["Llama"], tmp_path), targets="q_proj,embed_tokens")
    models = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        models.append(adapter_workload.model())
    names = [name for name in named_tensors(models[0]) if "embed_tokens" in name]
    assert len(names) == 1
    assert "lora_embedding_B" in names[0]
    parameter_maps = [dict(each.named_parameters()) for each in models]
    (name,) = [name for name in parameter_maps[0] if "lora_embedding_A" in name]
    assert torch.equal(parameter_maps[0][name], parameter_maps[1][name])
    assert not parameter_maps[0][names[0]].any()


def test_a_base_whose_rows_would_meet_is_not_packed_and_says_so(tmp_path: Path) -> None:
    from hypergpu.workloads.finetuning.packing import RowSeparation

    adapter_workload = workload(save_job(KINDS["Lfm2"], tmp_path))
    samples = adapter_workload.load(str(tmp_path)).train
    assert len(samples.labels) == 43
    assert any(
        "Lfm2ForCausalLM rows of one sample would see each other" in n
        for n in adapter_workload.notes
    )
    assert adapter_workload._row_inputs().separation is RowSeparation.ALONE


def test_rows_beyond_a_sliding_window_stay_apart() -> None:
    kind = KINDS["GptOss"]
    kind = kind._replace(settings={**kind.settings, "sliding_window": 4})
    outcome = try_base(kind)
    assert outcome.is_packed
    assert outcome.is_right


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (
            BaseKind("", {**KINDS["Bert"].settings}, "BertLMHeadModel", "BertConfig"),
            r"base is an encoder \(bert\): its tokens see those behind them, .* Fix: give a causal",
        ),
        (
            BaseKind("", _SIZES, "BartForConditionalGeneration", "BartConfig"),
            r"base is an encoder and a decoder \(bart\).* Fix: give a causal language model",
        ),
        (
            BaseKind(
                "",
                {
                    "image_size": 32,
                    "hidden_size": 32,
                    "num_hidden_layers": 1,
                    "num_attention_heads": 2,
                    "intermediate_size": 64,
                },
                "ViTModel",
                "ViTConfig",
            ),
            r"of the kind vit, of which transformers .* has no model to write text\. Fix: give",
        ),
    ],
    ids=["encoder", "encoder-decoder", "images"],
)
def test_a_base_that_writes_no_text_is_refused(tmp_path: Path, kind: BaseKind, said: str) -> None:
    save_job(kind, tmp_path)
    with pytest.raises(DatasetError, match=said):
        workload(tmp_path).model()


def test_a_kind_that_transformers_lacks_is_named(tmp_path: Path) -> None:
    base = save_job(KINDS["Llama"], tmp_path) / "base" / "config.json"
    settings = json.loads(base.read_text())
    base.write_text(json.dumps({**settings, "model_type": "sorcery"}))
    pattern = (
        f"kind 'sorcery', which transformers {transformers.__version__} does not have. Fix: take"
    )
    with pytest.raises(DatasetError, match=pattern):
        workload(tmp_path)


def test_attention_that_a_configuration_asks_for_is_not_fetched(tmp_path: Path) -> None:
    base = save_job(KINDS["Llama"], tmp_path) / "base" / "config.json"
    settings = json.loads(base.read_text())
    base.write_text(json.dumps({**settings, "attn_implementation": "nobody/kernel"}))
    assert workload(tmp_path).model().adapted.config._attn_implementation == "sdpa"


def test_a_token_that_the_base_lacks_is_named_with_its_row(tmp_path: Path) -> None:
    tokenizer = word_tokenizer()
    kind = KINDS["Llama"]
    save_job(kind._replace(settings={**kind.settings, "vocab_size": len(tokenizer)}), tmp_path)
    tokenizer.add_tokens(["<extra>"])
    tokenizer.save_pretrained(tmp_path / "base")
    (tmp_path / "train.jsonl").write_text('{"text": "w1 w2"}\n{"text": "w1 <extra>"}\n')
    pattern = (
        rf"train.jsonl, row 2 has the token '<extra>', .* the base has {len(tokenizer) - 1} tokens"
    )
    with pytest.raises(DatasetError, match=pattern):
        workload(tmp_path).check(str(tmp_path), has_train=True)


@pytest.mark.parametrize(("pad", "most"), [(0, 127), (5, 122)])
def test_positions_up_to_the_padding_are_no_places_for_text(
    tmp_path: Path, pad: int, most: int
) -> None:
    kind = KINDS["Roberta"]
    save_job(kind._replace(settings={**kind.settings, "pad_token_id": pad}), tmp_path)
    pattern = f"takes {most} tokens. Fix: set options.sequence_length = {most}"
    with pytest.raises(DatasetError, match=pattern):
        workload(tmp_path, "hf-text-classifier", labels="dark,light", sequence_length=128)
    classifier = workload(tmp_path, "hf-text-classifier", labels="dark,light", sequence_length=most)
    text = {"text": "w1 " * 200, "label": "dark"}
    (tmp_path / "train.jsonl").write_text("\n".join([json.dumps(text)] * 12))
    samples = classifier.load(str(tmp_path)).train
    with torch.inference_mode():
        fields = [torch.from_numpy(each) for each in samples.batch(np.arange(2))]
        assert classifier.logits(classifier.model().eval(), *fields[:2]).shape == (2, 2)


def test_a_writer_without_padding_fills_with_its_end_and_says_so_to_others(
    tmp_path: Path,
) -> None:
    kind = KINDS["GPT2, classifier"]
    settings = {**kind.settings, "pad_token_id": None, "eos_token_id": 2}
    save_job(kind._replace(settings=settings), tmp_path)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "base")
    tokenizer.pad_token = None
    tokenizer.save_pretrained(tmp_path / "base")
    classifier = workload(tmp_path, "hf-text-classifier", labels="dark,light")
    assert classifier.load(str(tmp_path)).train.padding == 2
    classifier.save_reader(tmp_path / "reader")
    assert transformers.AutoTokenizer.from_pretrained(tmp_path / "reader").pad_token == "</s>"


class PackingLayer(torch.nn.Linear):
    """A layer as bitsandbytes makes it where a processor has the kernel."""

    support_avx512bf16_for_cpu = True


def test_layers_of_four_bits_compute_alike_in_evaluation_and_training() -> None:
    from hypergpu.workloads.finetuning.base_model import use_training_kernels

    layers = torch.nn.Sequential(PackingLayer(2, 2), torch.nn.ReLU())
    use_training_kernels(layers)
    assert [getattr(each, "support_avx512bf16_for_cpu", None) for each in layers] == [False, None]


@pytest.mark.parametrize(
    ("targets", "said"),
    [
        ("nothing", r"options.targets: nothing is none of the base's modules. Fix: take from"),
        ("norm", r"options.targets: norm is LlamaRMSNorm, which takes no adapter. Fix: take from"),
    ],
)
def test_targets_that_take_no_adapter_are_named_with_those_that_do(
    tmp_path: Path, targets: str, said: str
) -> None:
    with pytest.raises(DatasetError, match=said + ".*q_proj"):
        workload(save_job(KINDS["Llama"], tmp_path), targets=targets).model()


def test_rows_without_an_answer_within_the_length_are_counted(tmp_path: Path) -> None:
    save_job(KINDS["Llama"], tmp_path)
    long = {"prompt": "w1 " * 90, "completion": " w2"}
    short = {"prompt": "w1", "completion": " w2"}
    lines = [json.dumps(each) for each in [long] * 9 + [short] * 3]
    (tmp_path / "train.jsonl").write_text("\n".join(lines))
    (tmp_path / "held_out.jsonl").write_text(lines[-1])
    adapter_workload = workload(tmp_path)
    adapter_workload.load(str(tmp_path))
    assert (
        "train: 9 of 12 rows are left out: no token that counts lies within"
        " options.sequence_length = 64"
    ) in adapter_workload.notes

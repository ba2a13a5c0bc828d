"""GGUF files read as transformers has their models: the same numbers, the same tokens, or none."""

import unicodedata
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
import transformers

from gpu_node.shell.worker.serving.gguf_model import GgufModel
from hypergpu.rings.layer_span import LayerSpan
from hypergpu.rings.stage_work import span_blobs
from hypergpu.workloads.finetuning.base_model import load_tokenizer
from hypergpu.workloads.gguf.__main__ import main
from hypergpu.workloads.gguf.reading import GgufTensors
from hypergpu.workloads.gguf.refusal import GgufRefusalError
from hypergpu.workloads.gguf.writing import write_gguf
from hypergpu.workloads.slices.cutting import cut_model
from hypergpu.workloads.slices.layer_blobs import SourceTensors
from tests.unit.training.test_gguf_export import LLAMA3_ROPE, TEXTS, save_random_base

LINEAR_ROPE = {"rope_type": "linear", "rope_theta": 5e3, "factor": 2.0}
KINDS: list[tuple[str, dict[str, Any]]] = [
    ("llama", {}),
    ("llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    ("llama", {"rope_parameters": LLAMA3_ROPE}),
    ("llama", {"rope_parameters": LINEAR_ROPE}),
    ("mistral", {"sliding_window": None}),
    ("qwen2", {}),
    ("qwen3", {}),
]


def file_of(folder: Path, kind: str = "llama", **changes: Any) -> tuple[Path, Path]:
    """A folder of transformers, and the file that is written of it."""
    base = save_random_base(folder, kind, **changes)
    return base, write_gguf(base, folder / "model.gguf").path


@pytest.mark.parametrize(("kind", "changes"), KINDS)
def test_a_file_gives_back_the_model_that_it_was_written_of(
    tmp_path: Path, kind: str, changes: dict[str, Any]
) -> None:
    base, path = file_of(tmp_path, kind, **changes)
    assert main(["--read", str(path), str(tmp_path / "folder"), "float32"]) == 0
    whole = transformers.AutoModelForCausalLM.from_pretrained(base)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "folder")
    tokens = torch.arange(60)[None] % 300
    with torch.inference_mode():
        assert torch.equal(model(input_ids=tokens).logits, whole(input_ids=tokens).logits)
    tokenizer, found_tokenizer = load_tokenizer(base), load_tokenizer(tmp_path / "folder")
    llama = GgufModel(path)
    for text in TEXTS:
        # transformers composes characters of texts for a Qwen2, whatever its tokenizer's file says.
        normal_text = unicodedata.normalize("NFC", text) if kind == "qwen2" else text
        assert found_tokenizer(text)["input_ids"] == llama.encode(normal_text)
        assert found_tokenizer(text)["input_ids"] == tokenizer(text)["input_ids"]
    assert found_tokenizer.chat_template == tokenizer.chat_template
    assert model.generation_config.eos_token_id in (4, [4])


def layers_of(folder: Path, out: Path, weights: Path | None) -> dict[str, torch.Tensor]:
    cut_model(folder, "float32", out, weights)
    source = SourceTensors([out / name for name in span_blobs(LayerSpan(0, 2), 2)])
    return {name: source.tensor(name) for name in source.names}


def test_layers_of_a_file_are_those_of_the_folder_that_it_was_written_of(tmp_path: Path) -> None:
    base, path = file_of(tmp_path)
    settings = tmp_path / "settings"
    settings.mkdir()
    GgufTensors(path).write_settings(settings)
    values = layers_of(settings, tmp_path / "of-file", path)
    base_values = layers_of(base, tmp_path / "of-base", None)
    assert values.keys() == base_values.keys()
    assert all(torch.equal(value, base_values[name]) for name, value in values.items())


@pytest.mark.parametrize("number_type", ["f16", "q8_0"])
def test_rounded_numbers_are_those_that_llama_cpp_computes_with(
    tmp_path: Path, number_type: str
) -> None:
    base = save_random_base(tmp_path, "llama")
    path = write_gguf(base, tmp_path / "model.gguf", number_type).path
    whole, rounded_tensors = SourceTensors([base / "model.safetensors"]), GgufTensors(path)
    for name in whole.names:
        value = rounded_tensors.tensor(name)
        assert value.shape == whole.tensor(name).shape
        assert torch.allclose(value, whole.tensor(name), atol=0.02)
    assert GgufTensors(path, torch.bfloat16).tensor("model.norm.weight").dtype == torch.bfloat16


@pytest.fixture(scope="module")
def plain_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return file_of(tmp_path_factory.mktemp("plain"))[1]


def rewritten(
    path: Path, folder: Path, change: Callable[[gguf.GGUFWriter, gguf.GGUFReader], None]
) -> Path:
    """A file with something more, or other, than the one that it is made of."""
    reader, other = gguf.GGUFReader(path), folder / "other.gguf"
    writer = gguf.GGUFWriter(other, "llama")
    for field in reader.fields.values():
        if not field.name.startswith("GGUF.") and field.name != "general.architecture":
            kind, sub_kind = field.types[0], field.types[-1] if len(field.types) > 1 else None
            writer.add_key_value(field.name, field.contents(), kind, sub_type=sub_kind)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    change(writer, reader)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return other


def with_tensor(name: str) -> Callable[[gguf.GGUFWriter, gguf.GGUFReader], None]:
    return lambda writer, reader: writer.add_tensor(name, reader.tensors[1].data)


def with_value(name: str, value: Any) -> Callable[[gguf.GGUFWriter, gguf.GGUFReader], None]:
    def change(writer: gguf.GGUFWriter, _: gguf.GGUFReader) -> None:
        writer.kv_data[0].pop(name, None)
        adders: dict[type, Callable[[str, Any], None]] = {
            str: writer.add_string,
            int: writer.add_uint32,
            float: writer.add_float32,
        }
        add = adders[type(value)]
        add(name, value)

    return change


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (with_tensor("blk.0.attn_q.bias"), "blk.0.attn_q.bias, which the model does not use"),
        (with_tensor("blk.0.ffn_gate_exps.weight"), "which has no place in the model"),
        (with_tensor("rope_freqs.weight"), "frequencies are scaled by another rule"),
        (with_value("llama.rope.scaling.type", "yarn"), "rope.scaling.type = 'yarn'"),
        (with_value("llama.logit_scale", 0.5), "llama.logit_scale = 0.5"),
        (with_value("tokenizer.ggml.pre", "tekken"), "by the rule 'tekken'"),
        (with_value("tokenizer.ggml.eos_token_id", 4_000), "its eos token is number 4000 of 400"),
        (with_value("general.architecture", "mamba"), "of the kind 'mamba' is not read here"),
    ],
)
def test_what_a_file_states_and_transformers_would_not_compute_refuses_it(
    plain_file: Path,
    tmp_path: Path,
    change: Callable[[gguf.GGUFWriter, gguf.GGUFReader], None],
    reason: str,
) -> None:
    with pytest.raises(GgufRefusalError, match=reason):
        GgufTensors(rewritten(plain_file, tmp_path, change)).write_settings(tmp_path)


def test_a_file_that_is_written_again_as_it_is_is_read(plain_file: Path, tmp_path: Path) -> None:
    GgufTensors(rewritten(plain_file, tmp_path, lambda *_: None)).write_settings(tmp_path)
    assert (tmp_path / "tokenizer.json").exists()


def test_a_file_that_lacks_a_tensor_or_is_none_is_refused_and_leaves_no_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF" + bytes(20))
    assert main(["--read", str(path), str(tmp_path / "folder"), "float32"]) == 1
    assert "error: " in capsys.readouterr().err
    assert [each.name for each in tmp_path.iterdir()] == ["model.gguf"]

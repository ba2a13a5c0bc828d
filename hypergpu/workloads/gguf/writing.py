"""Writes a folder of transformers as one GGUF file: weights, settings, tokenizer and template."""

from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import gguf
import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import safe_open

from hypergpu.workloads.finetuning.base_model import check_settings, load_config, load_tokenizer
from hypergpu.workloads.gguf.architectures import Tensors, architecture_of
from hypergpu.workloads.gguf.refusal import GgufRefusalError
from hypergpu.workloads.gguf.vocabulary import Vocabulary, vocabulary_of

_FILE_TYPES = {
    "f32": (gguf.LlamaFileType.ALL_F32, gguf.GGMLQuantizationType.F32),
    "f16": (gguf.LlamaFileType.MOSTLY_F16, gguf.GGMLQuantizationType.F16),
    "bf16": (gguf.LlamaFileType.MOSTLY_BF16, gguf.GGMLQuantizationType.BF16),
    "q8_0": (gguf.LlamaFileType.MOSTLY_Q8_0, gguf.GGMLQuantizationType.Q8_0),
}
NUMBER_TYPES = tuple(_FILE_TYPES)
"""How weights may be rounded; those of one dimension never are."""
_TOKENIZER_FILES = ("*.json", "*.jinja")


class WrittenGguf(NamedTuple):
    """A file that was written."""

    path: Path
    architecture: str
    parameters: int


def write_gguf(folder: Path, path: Path, number_type: str = "f32") -> WrittenGguf:
    """Write the model of a folder. The file is there whole, or not at all.

    Args:
        folder: What ``save_pretrained`` of transformers wrote, with its tokenizer.
        path: The file, replaced where it is there.
        number_type: One of `NUMBER_TYPES`.

    Raises:
        GgufRefusalError: The model or its tokenizer is none that is written.
        DatasetError: The folder cannot be loaded.
    """
    for settings_path in sorted(folder.glob("*.json")):
        check_settings(settings_path)
    config = load_config(folder)
    architecture = architecture_of(config)
    settings = architecture.checked_settings(config)
    tokenizer = load_tokenizer(folder)
    vocabulary = vocabulary_of(tokenizer, int(config.vocab_size))
    tensors = architecture.tensors(config, folder_weights(folder))
    part = path.with_name(f".{path.name}.part")
    writer = gguf.GGUFWriter(part, architecture.name)
    try:
        _add_settings(writer, settings, number_type)
        _add_tokenizer(writer, tokenizer, vocabulary)
        _add_end_tokens(writer, folder, tokenizer)
        _add_tensors(writer, tensors, number_type)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
    parameters = sum(tensor.numel() for tensor in tensors.values())
    return WrittenGguf(path, architecture.name, parameters)


def folder_weights(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """The weights of a folder's safetensors, one after another.

    Raises:
        GgufRefusalError: There are none.
    """
    paths = sorted(folder.glob("*.safetensors"))
    if not paths:
        raise GgufRefusalError(f"{folder} holds no *.safetensors")
    for path in paths:
        with safe_open(path, framework="pt") as weights:
            for name in weights.keys():  # noqa: SIM118 - it is no mapping
                yield name, weights.get_tensor(name)


def _add_settings(writer: gguf.GGUFWriter, settings: dict[str, Any], number_type: str) -> None:
    writer.add_file_type(_FILE_TYPES[number_type][0])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    writer.add_string("general.quantized_by", f"hypergpu {version('hypergpu')}")
    for key, value in settings.items():
        if isinstance(value, str):
            writer.add_string(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        else:
            writer.add_uint32(key, value)


def _add_tokenizer(writer: gguf.GGUFWriter, tokenizer: Any, vocabulary: Vocabulary) -> None:
    writer.add_tokenizer_model(vocabulary.model)
    writer.add_tokenizer_pre(vocabulary.rule)
    writer.add_token_list(vocabulary.tokens)
    writer.add_token_types(vocabulary.types)
    if vocabulary.merges:
        writer.add_token_merges(vocabulary.merges)
    if vocabulary.scores:
        writer.add_token_scores(vocabulary.scores)
    writer.add_add_space_prefix(vocabulary.has_space_before)
    begin, end = tokenizer.bos_token_id, tokenizer.eos_token_id
    sample = tokenizer("a")["input_ids"]
    writer.add_add_bos_token(begin is not None and sample[:1] == [begin])
    writer.add_add_eos_token(end is not None and len(sample) > 1 and sample[-1:] == [end])
    for add, token in (
        (writer.add_bos_token_id, begin),
        (writer.add_unk_token_id, tokenizer.unk_token_id),
        (writer.add_pad_token_id, tokenizer.pad_token_id),
    ):
        if token is not None:
            add(int(token))
    template = tokenizer.chat_template
    if isinstance(template, dict):
        template = template.get("default")
    if template:
        writer.add_chat_template(template)


def _add_end_tokens(writer: gguf.GGUFWriter, folder: Path, tokenizer: Any) -> None:
    """State which tokens end an answer: there is room for one of texts and one of turns."""
    from transformers import GenerationConfig

    ends: list[int | None] = []
    if (folder / "generation_config.json").exists():
        stated_end = GenerationConfig.from_pretrained(folder).eos_token_id
        ends += stated_end if isinstance(stated_end, list) else [stated_end]
    ends.append(tokenizer.eos_token_id)
    distinct_ends = list(dict.fromkeys(end for end in ends if end is not None))
    if len(distinct_ends) > 2:
        raise GgufRefusalError(f"the model has {len(distinct_ends)} tokens that end an answer")
    for add, end in zip((writer.add_eos_token_id, writer.add_eot_token_id), distinct_ends):  # noqa: B905 - there may be one
        add(int(end))


def _add_tensors(writer: gguf.GGUFWriter, tensors: Tensors, number_type: str) -> None:
    for name, tensor in tensors.items():
        kind = _FILE_TYPES[number_type][1] if tensor.dim() > 1 else gguf.GGMLQuantizationType.F32
        block_numbers, _ = gguf.GGML_QUANT_SIZES[kind]
        if tensor.shape[-1] % block_numbers:
            kind = gguf.GGMLQuantizationType.F16
        numbers: NDArray[np.float32] = tensor.detach().float().contiguous().numpy()
        writer.add_tensor(name, gguf.quants.quantize(numbers, kind), raw_dtype=kind)

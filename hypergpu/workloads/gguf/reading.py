"""A GGUF file as transformers has its model: settings, tokenizer, and weights one by one."""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import gguf
import msgspec
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedConfig

from hypergpu.errors import HyperGPUError
from hypergpu.gguf.header import GgufHeader, read_gguf_header
from hypergpu.workloads.gguf.file_tokenizer import save_tokenizer
from hypergpu.workloads.gguf.refusal import GgufRefusalError, file_refusal
from hypergpu.workloads.gguf.settings import ROTARY_FACTORS, architecture_of_file, config_of_file

_LAYER = re.compile(r"model\.layers\.(\d+)\.")
_END_MARKS = ("eos", "eot", "eom")


class GgufTensors:
    """Weights of a file by transformers' names; each is read when it is asked for, in float32.

    Args:
        path: The file.
        dtype: What weights are given as.

    Raises:
        GgufRefusalError: The file's header is not right, it states what transformers' configuration
            cannot, or has other tensors than the model.
    """

    def __init__(self, path: Path, dtype: torch.dtype = torch.float32) -> None:
        header = _checked_header(path)
        self._architecture = architecture_of_file(header)
        self._dtype = dtype
        try:
            reader = gguf.GGUFReader(path)
        except Exception as error:  # a library's reader may raise anything
            raise file_refusal(f"{path.name} cannot be read: {error}") from error
        self._tensors: Mapping[str, Any] = {each.name: each for each in reader.tensors}
        rotary = self._numbers(ROTARY_FACTORS) if ROTARY_FACTORS in self._tensors else None
        self.config = config_of_file(header, rotary)
        """The model's."""
        self._places = self._checked_places()
        self._path, self._header, self._fields = path, header, reader.fields

    @property
    def names(self) -> list[str]:
        """All names."""
        return list(self._places)

    def tensor(self, name: str) -> torch.Tensor:
        """One weight."""
        numbers = self._numbers(self._places[name])
        return self._architecture.read_weight(name, numbers, self.config).to(self._dtype)

    def write_settings(self, folder: Path) -> None:
        """Write the file's configuration and tokenizer, as transformers loads them.

        Args:
            folder: That exists.

        Raises:
            GgufRefusalError: transformers' tokenizer would not be the file's.
            DatasetError: What was written cannot be loaded.
        """
        self.config.save_pretrained(folder)
        marks = [self._header.number(f"tokenizer.ggml.{name}_token_id") for name in _END_MARKS]
        ends = list(dict.fromkeys(each for each in marks if each is not None))
        if ends:
            GenerationConfig(eos_token_id=ends).save_pretrained(folder)
        save_tokenizer(self._path, self._header, self._fields, folder)

    def _numbers(self, name: str) -> torch.Tensor:
        tensor = self._tensors[name]
        try:
            numbers = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        except NotImplementedError as error:
            kind = tensor.tensor_type.name
            raise file_refusal(f"{name} is of the type {kind}, which is not read here") from error
        return torch.from_numpy(numbers.copy()).float()

    def _checked_places(self) -> dict[str, str]:
        """Names in the file by transformers' names, once they are the model's."""
        places: dict[str, str] = {}
        for name in self._tensors:
            if name == ROTARY_FACTORS:
                continue
            source_name = self._architecture.source_name(name)
            if not source_name:
                raise file_refusal(f"it has the tensor {name}, which has no place in the model")
            places[source_name] = name
        shapes = _shapes_of(self.config)
        odd = sorted(name for name in places if name not in shapes)
        if odd:
            detail = f"it has the tensor {places[odd[0]]}, which the model does not use"
            raise file_refusal(detail)
        absent = sorted(set(shapes) - set(places))
        if absent:
            detail = f"it lacks {len(absent)} tensors of the model, such as {absent[0]}"
            raise file_refusal(detail)
        for source_name, name in places.items():
            # A file states the dimension first whose numbers lie side by side.
            shape = tuple(int(side) for side in reversed(self._tensors[name].shape))
            if shape != shapes[source_name]:
                detail = f"{name} has the shape {shape}, and the model's {shapes[source_name]}"
                raise file_refusal(detail)
        return places


def _checked_header(path: Path) -> GgufHeader:
    try:
        header = read_gguf_header(path)
    except HyperGPUError as error:
        raise GgufRefusalError(str(error)) from error
    if header.number("split.count") not in {None, 0, 1}:
        parts = header.number("split.count")
        raise GgufRefusalError(
            f"{path.name} is one of {parts} parts of a model."
            " Fix: join them first: llama-gguf-split --merge FIRST-PART.gguf WHOLE.gguf"
        )
    return header


def _shapes_of(config: PreTrainedConfig) -> dict[str, tuple[int, ...]]:
    """Shapes of a model's weights; no memory is taken for them."""
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(config)
    shapes = {name: tuple(each.shape) for name, each in model.state_dict().items()}
    if config.tie_word_embeddings:
        shapes.pop("lm_head.weight", None)
    return shapes


def write_folder(path: Path, folder: Path, dtype: torch.dtype) -> Iterator[Path]:
    """Write a file's model as ``save_pretrained`` would, with a file of weights for each layer: one
    layer is in memory at a time.

    Args:
        path: The file.
        folder: That exists.
        dtype: What weights are written as.

    Raises:
        GgufRefusalError: transformers' model would not be the file's.
        DatasetError: What was written cannot be loaded.
        OSError: A file cannot be written.
    """
    tensors = GgufTensors(path, dtype)
    tensors.write_settings(folder)
    files: dict[str, list[str]] = {}
    for name in tensors.names:
        match = _LAYER.match(name)
        files.setdefault(f"layer-{int(match[1]):03d}" if match else "ends", []).append(name)
    places: dict[str, str] = {}
    for label, names in sorted(files.items()):
        weights_path = folder / f"model-{label}.safetensors"
        values = {name: tensors.tensor(name).contiguous() for name in names}
        save_file(values, weights_path, metadata={"format": "pt"})
        places.update(dict.fromkeys(names, weights_path.name))
        yield weights_path
    index = {"metadata": {}, "weight_map": dict(sorted(places.items()))}
    (folder / "model.safetensors.index.json").write_bytes(
        msgspec.json.format(msgspec.json.encode(index))
    )

"""A model as one file a layer, so that a node fetches and reads only the layers that it holds.

``embed``, ``layer-NNN`` and ``head`` are safetensors with the names that transformers gives to the
whole model's tensors, whatever names the folder's own files have. No more than one of them is in
memory at a time, to write or to read.
"""

import struct
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import nn
from transformers import PreTrainedConfig

from hypergpu.rings.layer_span import LayerSpan
from hypergpu.rings.stage_work import EMBED_BLOB, HEAD_BLOB, layer_blob, span_blobs
from hypergpu.workloads.finetuning.base_model import first_sentence
from hypergpu.workloads.slices.layer_slice import LayerSlice, SliceError, layers_of

HEADER_BYTES_MOST = 4 << 20
"""Size of a file's header at most: it names the tensors of one layer."""
_LENGTH_BYTES = 8


class Source(Protocol):
    """Tensors of a whole model; each is read when it is asked for."""

    @property
    def names(self) -> list[str]:
        """All names."""
        ...

    def tensor(self, name: str) -> torch.Tensor:
        """One tensor, as it is stored."""
        ...


class SourceTensors:
    """Tensors of a folder's safetensors, by their names there.

    Args:
        paths: The files.

    Raises:
        SliceError: A file cannot be read.
    """

    def __init__(self, paths: Iterable[Path]) -> None:
        self._places: dict[str, Path] = {}
        for path in paths:
            try:
                with safe_open(path, framework="pt") as file:
                    self._places.update(dict.fromkeys(file.keys(), path))
            except (OSError, SafetensorError) as error:
                raise SliceError(f"{path.name} cannot be read: {error}") from error

    @property
    def names(self) -> list[str]:
        """All names."""
        return list(self._places)

    def tensor(self, name: str) -> torch.Tensor:
        """One tensor, as it is stored."""
        with safe_open(self._places[name], framework="pt") as file:
            tensor: torch.Tensor = file.get_tensor(name)
            return tensor


def write_blobs(config: PreTrainedConfig, source: Source, folder: Path) -> Iterator[Path]:
    """Write a model's files one after another, in the order of `span_blobs` of the whole.

    Args:
        config: The model's.
        source: Its tensors.
        folder: That exists. A caller may remove each file before it asks for the next.

    Raises:
        SliceError: The model cannot be cut, or lacks tensors.
    """
    total = layers_of(config)
    for layer in range(total):
        layer_slice = LayerSlice(config, LayerSpan(layer, layer + 1))
        values = _values_of(layer_slice, source, layer)
        for name, part in _by_file(layer_slice, values).items():
            path = folder / name
            try:
                save_file(part, path)
            except (OSError, SafetensorError) as error:
                raise SliceError(f"{path.name} cannot be written: {error}") from error
            yield path


def _by_file(
    layer_slice: LayerSlice, values: Mapping[str, torch.Tensor]
) -> dict[str, dict[str, torch.Tensor]]:
    """Tensors of one layer's slice by the files that they belong to."""
    span, parts = layer_slice.span, {}
    names = span_blobs(span, layer_slice.layers_total)
    parts = {name: dict[str, torch.Tensor]() for name in names}
    embedding_names = _embedding_names(layer_slice)
    for name, value in values.items():
        if name.startswith(layer_slice.layer_prefix):
            place = layer_blob(span.first)
        elif name in embedding_names:
            place = EMBED_BLOB
        else:
            place = HEAD_BLOB
        if place not in parts:
            raise SliceError(f"the model keeps {name} beside its layers, where no slice has it")
        parts[place][name] = value
    return parts


def _embedding_names(layer_slice: LayerSlice) -> frozenset[str]:
    if not layer_slice.is_first:
        return frozenset()
    embedder = layer_slice.model.get_input_embeddings()
    return frozenset(
        f"{place}.{name}"
        for place, module in layer_slice.model.named_modules()
        if module is embedder
        for name in module.state_dict()
    )


def _values_of(layer_slice: LayerSlice, source: Source, layer: int) -> dict[str, Any]:
    """Tensors of one layer's slice, by the names that the whole model has for them."""
    names = dict(layer_slice.whole_names())
    if all(_source_name(layer_slice, whole, source) for whole in names.values()):
        return {
            whole: source.tensor(_source_name(layer_slice, whole, source)).contiguous().clone()
            for whole in names.values()
        }
    values = _converted_values(layer_slice, source, layer)
    return {whole: values[name].contiguous().clone() for name, whole in names.items()}


def _source_name(layer_slice: LayerSlice, whole: str, source: Source) -> str:
    """Name that the folder has for a tensor; empty: it has another form of it."""
    names = set(source.names)
    prefix = f"{layer_slice.model.base_model_prefix}."
    twin = _tied_name(layer_slice, whole)
    candidates = (whole, whole.removeprefix(prefix), twin, twin.removeprefix(prefix))
    return next((name for name in candidates if name and name in names), "")


def _tied_name(layer_slice: LayerSlice, whole: str) -> str:
    """Name of the embedding, for a head that is the same tensor; empty: it is not."""
    if not layer_slice.is_last or not layer_slice.model.config.tie_word_embeddings:
        return ""
    tied_names: Any = getattr(layer_slice.model, "_tied_weights_keys", None) or {}
    return str(tied_names.get(whole, "")) if isinstance(tied_names, dict) else ""


def _converted_values(
    layer_slice: LayerSlice, source: Source, layer: int
) -> dict[str, torch.Tensor]:
    """Tensors that transformers makes of a folder's, such as of a tensor for each expert.

    Only those of one layer are read: all that are named by its number, and those of no layer where
    the slice has an end of the model.
    """
    # Names of a library's own: it has no public way to load a part of a model.
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import convert_and_load_state_dict_in_model
    from transformers.modeling_utils import LoadStateDictConfig

    model = layer_slice.model
    settings = LoadStateDictConfig(weight_mapping=get_model_conversion_mapping(model))
    values = {
        name.replace(f"layers.{layer}.", "layers.0.", 1): source.tensor(name)
        for name in source.names
        if f"layers.{layer}." in name or ("layers." not in name and _has_an_end(layer_slice))
    }
    try:
        report, _ = convert_and_load_state_dict_in_model(model, values, settings)
    except Exception as error:  # a library's conversion may raise anything
        raise SliceError(
            f"layer {layer} cannot be made of the folder's tensors: {first_sentence(error)}"
        ) from error
    absent = sorted(set(report.missing_keys) - _tied_names(layer_slice))
    if absent:
        raise SliceError(
            f"the folder lacks {len(absent)} tensors of layer {layer}, such as {absent[0]}."
            " Fix: give the folder of a whole model, as save_pretrained wrote it"
        )
    state: dict[str, torch.Tensor] = model.state_dict()
    for name in _tied_names(layer_slice) & set(report.missing_keys):
        place = _source_name(layer_slice, name, source)
        if not place:
            raise SliceError(f"the folder lacks {name}")
        state[name] = source.tensor(place)
    return state


def _has_an_end(layer_slice: LayerSlice) -> bool:
    return layer_slice.is_first or layer_slice.is_last


def _tied_names(layer_slice: LayerSlice) -> set[str]:
    return {name for name, _ in layer_slice.whole_names() if _tied_name(layer_slice, name)}


def load_blobs(
    layer_slice: LayerSlice, paths: Mapping[str, Path], dtype: torch.dtype, device: torch.device
) -> None:
    """Give a slice its tensors, one file after another.

    Args:
        layer_slice: Without values so far.
        paths: Files by their names; their digests were checked before.
        dtype: What floating-point tensors are held as.
        device: Where they are held.

    Raises:
        SliceError: A file is absent or malformed, or holds other tensors than the slice has.
    """
    own_names = {whole: name for name, whole in layer_slice.whole_names()}
    shapes = {name: tuple(each.shape) for name, each in layer_slice.model.state_dict().items()}
    for blob in span_blobs(layer_slice.span, layer_slice.layers_total):
        if blob not in paths:
            raise SliceError(f"the file {blob} is absent")
        header = read_header(paths[blob])
        values = {}
        with safe_open(paths[blob], framework="pt") as file:
            for whole, shape in header.items():
                name = own_names.pop(whole, None)
                if name is None or shapes[name] != shape:
                    raise SliceError(f"{blob} holds {whole} of shape {shape}, which is no part")
                tensor = file.get_tensor(whole)
                kept_dtype = dtype if tensor.is_floating_point() else tensor.dtype
                tensor = tensor.to(device, kept_dtype, copy=True)
                values[name] = nn.Parameter(tensor, requires_grad=False)
        layer_slice.model.load_state_dict(values, strict=False, assign=True)
    if own_names:
        raise SliceError(f"its files lack {len(own_names)} tensors, such as {min(own_names)}")
    # Tables of positions are real from the beginning, and follow to the device.
    layer_slice.model.to(device)


def read_header(path: Path) -> dict[str, tuple[int, ...]]:
    """Names and shapes of a file's tensors, read before any library opens it.

    Raises:
        SliceError: It is malformed, or its sizes do not agree with the file's.
    """
    size_bytes = path.stat().st_size
    with path.open("rb") as file:
        prefix = file.read(_LENGTH_BYTES)
        if len(prefix) < _LENGTH_BYTES:
            raise SliceError(f"{path.name} is cut short")
        (length,) = struct.unpack("<Q", prefix)
        if not 0 < length <= min(HEADER_BYTES_MOST, size_bytes - _LENGTH_BYTES):
            raise SliceError(f"{path.name} states a header of {length} bytes")
        content = file.read(length)
    try:
        entries = msgspec.json.decode(content, type=dict[str, Any])
        entries.pop("__metadata__", None)
        tensors = msgspec.convert(entries, dict[str, _TensorEntry])
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise SliceError(f"the header of {path.name} is malformed: {error}") from error
    end = 0
    for name, entry in sorted(tensors.items(), key=lambda item: item[1].data_offsets):
        begin, next_end = entry.data_offsets
        if begin != end or next_end < begin or any(each < 0 for each in entry.shape):
            raise SliceError(f"{path.name} states a wrong place for {name}")
        end = next_end
    if end != size_bytes - _LENGTH_BYTES - length:
        raise SliceError(f"{path.name} has another size than its tensors")
    return {name: tuple(entry.shape) for name, entry in tensors.items()}


class _TensorEntry(msgspec.Struct, frozen=True):
    """A tensor as a header has it."""

    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]

"""The model that gets an adapter: a folder of ``config.json``, safetensors and tokenizer files.

Nothing is downloaded, no code of the folder is run and nothing is unpickled: custom classes and
weights in other formats are refused.
"""

import importlib.util
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch
import transformers
from torch import nn
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoTokenizer,
    BitsAndBytesConfig,
    PreTrainedConfig,
)
from transformers.utils.logging import disable_progress_bar, set_verbosity_error

from hypergpu.workloads.datasets import DatasetError
from hypergpu.workloads.finetuning.row_files import BASE_FOLDER
from hypergpu.workloads.finetuning.rows import CONFIG, base_digest

FOUR_BIT = "4bit"
_LOCAL: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}


def base_folder(data_dir: str) -> Path:
    """The base's part of a job's folder.

    Raises:
        DatasetError: There is none.
    """
    folder = Path(data_dir) / BASE_FOLDER
    if not data_dir or not (folder / CONFIG).is_file():
        raise DatasetError(
            f"there is no {BASE_FOLDER}/{CONFIG} in the job's data. Fix: put the model that gets"
            f" the adapter (config.json, *.safetensors, tokenizer files) into {BASE_FOLDER}/"
        )
    return folder


def check_base(folder: Path, wanted: str) -> str:
    """The base's digest.

    Args:
        folder: The base's.
        wanted: The only digest that is taken; empty: any.

    Raises:
        DatasetError: It is another base, or no base that may be loaded.
    """
    if not any(folder.glob("*.safetensors")):
        raise DatasetError(
            f"{folder.name} holds no *.safetensors. Fix: save the model with"
            " save_pretrained(folder), which writes them; other formats are not loaded"
        )
    for path in sorted(folder.glob("*.json")):
        check_settings(path)
    digest = base_digest(folder)
    if wanted and digest != wanted:
        raise DatasetError(
            f"the base is {digest[:16]}... and the job's is {wanted[:16]}... Fix: give the job the"
            " base that it names"
        )
    return digest


def check_settings(path: Path) -> None:
    """Refuse settings that name code of their own.

    Raises:
        DatasetError: They do, or cannot be read.
    """
    try:
        settings = msgspec.json.decode(path.read_bytes())
    except (OSError, msgspec.DecodeError) as error:
        raise DatasetError(f"{path.name} cannot be read: {error}") from error
    if isinstance(settings, dict) and "auto_map" in settings:
        raise DatasetError(
            f"{path.name} names code of its own (auto_map), which is never run."
            " Fix: take a model whose class transformers has"
        )


def load_config(folder: Path, **changes: Any) -> PreTrainedConfig:
    """The base's configuration, with changes; attention is as `load_base` chooses it.

    Raises:
        DatasetError: transformers does not know it.
    """
    _check_kind(folder)
    try:
        config: PreTrainedConfig = AutoConfig.from_pretrained(folder, **_LOCAL, **changes)
    except Exception as error:  # a class may raise anything over a configuration
        raise _unusable(folder, error) from error
    # What a configuration asks for may be absent here, and may be code of a hub.
    for each in (config, *(getattr(config, name, None) for name in config.sub_configs)):
        if isinstance(each, PreTrainedConfig):
            each._attn_implementation = None  # noqa: SLF001 - has no other setter
    return config


def _check_kind(folder: Path) -> None:
    settings = msgspec.json.decode((folder / CONFIG).read_bytes())
    kind = settings.get("model_type") if isinstance(settings, dict) else None
    if not isinstance(kind, str):
        raise DatasetError(
            f"{folder.name}/{CONFIG} states no model_type. Fix: save the model with"
            " save_pretrained(folder) of transformers"
        )
    if kind not in CONFIG_MAPPING:
        raise DatasetError(
            f"{folder.name} is of the kind {kind!r}, which transformers {transformers.__version__}"
            " does not have. Fix: take a base of a kind that it has"
        )


def check_task(auto: Any, config: PreTrainedConfig, task: str) -> None:
    """Refuse a base that no class of transformers makes a model for a task of.

    Args:
        auto: One of transformers' classes that load by a configuration.
        config: The base's.
        task: What the model shall do, for the message, such as ``write text``.

    Raises:
        DatasetError: There is no such class.
    """
    if type(config) not in auto._model_mapping:  # noqa: SLF001 - has no other name
        raise DatasetError(
            f"base is of the kind {config.model_type}, of which transformers"
            f" {transformers.__version__} has no model to {task}."
            f" Fix: give a base that {auto.__name__} loads"
        )


def load_tokenizer(folder: Path) -> Any:
    """The base's tokenizer, which tells where each token came from.

    Raises:
        DatasetError: There is none.
    """
    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(folder, **_LOCAL)
    except Exception as error:  # a class may raise anything over its files
        raise DatasetError(
            f"{folder.name} has no tokenizer that can be loaded: {first_sentence(error)}."
            f" Fix: {_SAVE_TOKENIZER}"
        ) from error
    if not tokenizer.is_fast:
        raise DatasetError(f"{folder.name} has no tokenizer.json. Fix: {_SAVE_TOKENIZER}")
    return tokenizer


_SAVE_TOKENIZER = "save the fast tokenizer beside the model: tokenizer.save_pretrained(folder)"


class LoadedBase(NamedTuple):
    """A base in memory."""

    model: Any
    absent: tuple[str, ...]
    """Parameters that the folder does not have, all of them of the head."""


def empty_model(auto: Any, config: PreTrainedConfig) -> Any:
    """The base's modules without any values: they take no memory.

    Raises:
        DatasetError: It cannot be made of its configuration.
    """
    try:
        with torch.device("meta"), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return auto.from_config(config)
    except Exception as error:  # a class may raise anything over a configuration
        raise DatasetError(
            f"base cannot be made of its {CONFIG}: {first_sentence(error)}."
            " Fix: give the folder as save_pretrained wrote it"
        ) from error


def head_names(model: Any) -> tuple[str, ...]:
    """Modules with parameters that a class of transformers has beside the base itself."""
    prefix = model.base_model_prefix
    if not hasattr(model, prefix):
        return ()
    return tuple(
        name
        for name, module in model.named_children()
        if name != prefix and any(True for _ in module.parameters())
    )


_POSITION_NAMES = frozenset({"wpe", "embed_positions", "position_embeddings", "positions_embed"})


def positions_most(auto: Any, config: PreTrainedConfig) -> int | None:
    """Tokens that a base takes; None: any number.

    Tables of positions may have rows that no token gets: those up to the padding's in RoBERTa.
    """
    stated_positions = getattr(config.get_text_config(), "max_position_embeddings", None)
    limits = (
        [stated_positions] if isinstance(stated_positions, int) and stated_positions > 0 else []
    )
    for name, module in empty_model(auto, config).named_modules():
        if isinstance(module, nn.Embedding) and name.rpartition(".")[2] in _POSITION_NAMES:
            unused_positions = getattr(module, "offset", 0)
            if isinstance(module.padding_idx, int):
                unused_positions = module.padding_idx + 1
            limits.append(module.num_embeddings - unused_positions)
    return min(limits, default=None)


def check_length(length: int, most: int | None) -> None:
    """Refuse samples of more tokens than a base takes.

    Raises:
        DatasetError: They are longer.
    """
    if most is not None and length > most:
        raise DatasetError(
            f"options.sequence_length is {length} and the base takes {most} tokens."
            f" Fix: set options.sequence_length = {most}"
        )


def load_base(
    auto: Any, folder: Path, config: PreTrainedConfig, *, dtype: str, head: tuple[str, ...] = ()
) -> LoadedBase:
    """The base as a module of transformers, with torch's own attention where its class has it.

    Args:
        auto: One of transformers' classes that load by a configuration.
        folder: The base's.
        config: The base's, with changes.
        dtype: What parameters are held as; ``4bit``: those of linear layers as NF4 (Dettmers et al.
            2023, arXiv:2305.14314), all others as float32.
        head: Modules that the folder may lack, or have in other shapes, beside a pooler.

    Raises:
        DatasetError: It cannot be loaded, or lacks parameters.
    """
    disable_progress_bar()
    set_verbosity_error()  # What it would report of tensors is checked below.
    storage = _storage(dtype, head)
    try:
        model, loading_info = auto.from_pretrained(
            folder,
            config=config,
            **storage,
            use_safetensors=True,
            ignore_mismatched_sizes=bool(head),
            output_loading_info=True,
            **_LOCAL,
        )
    except Exception as error:  # a class may raise anything over its weights
        raise _unusable(folder, error) from error
    names = {
        str(each[0] if isinstance(each, tuple) else each)
        for each in loading_info["mismatched_keys"]
    }
    absent = sorted(names | set(loading_info["missing_keys"]))
    allowed_names = {*head, _POOLER} if head else set()
    wrong = [name for name in absent if not allowed_names.intersection(name.split("."))]
    if wrong:
        raise DatasetError(
            f"{folder.name} lacks {len(wrong)} of the model's tensors, such as {wrong[0]}."
            " Fix: give the folder of a whole model of this kind"
        )
    if dtype == FOUR_BIT:
        use_training_kernels(model)
    return LoadedBase(model, tuple(absent))


_INFERENCE_KERNEL = "support_avx512bf16_for_cpu"
"""Attribute of bitsandbytes' layers: in evaluation mode they pack their weights for a kernel that
has no gradient, on processors that have it.
"""


def use_training_kernels(model: nn.Module) -> None:
    """Have layers of four bits compute alike in training and evaluation, on every processor."""
    for module in model.modules():
        if hasattr(module, _INFERENCE_KERNEL):
            setattr(module, _INFERENCE_KERNEL, False)


_POOLER = "pooler"
"""Part of some bases that was trained for nothing else, and that others were saved without."""


def trained_head(base: LoadedBase) -> tuple[str, ...]:
    """Modules of a classifier that are trained as a whole."""
    head = head_names(base.model)
    lacks_pooler = any(_POOLER in name.split(".") for name in base.absent)
    return (*head, _POOLER) if lacks_pooler and _POOLER not in head else head


def _storage(dtype: str, head: tuple[str, ...]) -> dict[str, Any]:
    """How transformers shall hold parameters: alike on every machine, whatever it computes on."""
    if dtype != FOUR_BIT:
        return {"dtype": getattr(torch, dtype)}
    if importlib.util.find_spec("bitsandbytes") is None:
        raise DatasetError(
            'options.base_dtype = "4bit" needs bitsandbytes, which is not installed.'
            " Fix: pip install 'hypergpu[hf4bit]' on the nodes and the coordinator"
        )
    has_bf16 = torch.cuda.is_available() and torch.cuda.is_bf16_supported()
    quantization = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_compute_dtype=torch.bfloat16 if has_bf16 else torch.float32,
        llm_int8_skip_modules=list(head) or None,
    )
    return {"dtype": torch.float32, "quantization_config": quantization}


_SENTENCE_MOST = 200


def first_sentence(broken: Exception) -> str:
    """The beginning of another library's text, cut behind a word; its advice is left out."""
    text = " ".join(str(broken).split()) or type(broken).__name__
    text = text.partition(". ")[0].rstrip(".")
    if len(text) <= _SENTENCE_MOST:
        return text
    return text[:_SENTENCE_MOST].rpartition(" ")[0] + " ..."


def _unusable(folder: Path, broken: Exception) -> DatasetError:
    return DatasetError(
        f"{folder.name} cannot be loaded by transformers: {first_sentence(broken)}."
        " Fix: save the model anew with save_pretrained(folder)"
    )

"""The model that gets an adapter: a folder of ``config.json``, safetensors and tokenizer files.

Nothing is downloaded, no code of the folder is run and nothing is unpickled: custom classes and
weights in other formats are refused.
"""

import importlib.util
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch
from safetensors import SafetensorError
from transformers import AutoConfig, AutoTokenizer, BitsAndBytesConfig, PreTrainedConfig
from transformers.utils.logging import disable_progress_bar

from hypergpu.workloads.finetuning.rows import BASE_FOLDER, CONFIG, base_digest
from hypergpu.workloads.workload import DatasetError

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
        _check_settings(path)
    found = base_digest(folder)
    if wanted and found != wanted:
        raise DatasetError(
            f"the base is {found[:16]}... and the job's is {wanted[:16]}... Fix: give the job the"
            " base that it names"
        )
    return found


def _check_settings(path: Path) -> None:
    try:
        settings = msgspec.json.decode(path.read_bytes())
    except (OSError, msgspec.DecodeError) as broken:
        raise DatasetError(f"{path.name} cannot be read: {broken}") from broken
    if isinstance(settings, dict) and "auto_map" in settings:
        raise DatasetError(
            f"{path.name} names code of its own (auto_map), which is never run."
            " Fix: take a model whose class transformers has"
        )


def load_config(folder: Path, **changes: Any) -> PreTrainedConfig:
    """The base's configuration, with changes.

    Raises:
        DatasetError: transformers does not know it.
    """
    try:
        config: PreTrainedConfig = AutoConfig.from_pretrained(folder, **_LOCAL, **changes)
    except (OSError, ValueError, KeyError, TypeError) as broken:
        raise _unusable(folder, broken) from broken
    return config


def load_tokenizer(folder: Path) -> Any:
    """The base's tokenizer, which tells where each token came from.

    Raises:
        DatasetError: There is none.
    """
    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(folder, **_LOCAL)
    except (OSError, ValueError, KeyError, TypeError) as broken:
        raise _unusable(folder, broken) from broken
    if not tokenizer.is_fast:
        raise DatasetError(
            f"{folder.name} has no tokenizer.json. Fix: save the fast tokenizer beside the model"
        )
    return tokenizer


class LoadedBase(NamedTuple):
    """A base in memory."""

    model: Any
    absent: tuple[str, ...]
    """Parameters that the folder does not have, all of them of the head."""


def load_base(
    auto: Any, folder: Path, config: PreTrainedConfig, *, dtype: str, head: tuple[str, ...] = ()
) -> LoadedBase:
    """The base as a module of transformers.

    Args:
        auto: One of transformers' classes that load by a configuration.
        folder: The base's.
        config: The base's, with changes.
        dtype: What parameters are held as; ``4bit``: those of linear layers as NF4 (Dettmers et al.
            2023, arXiv:2305.14314), all others as float32.
        head: Modules that the folder may lack, or have in other shapes.

    Raises:
        DatasetError: It cannot be loaded, or lacks parameters.
    """
    disable_progress_bar()
    try:
        model, found = auto.from_pretrained(
            folder,
            config=config,
            **_storage(dtype, head),
            use_safetensors=True,
            attn_implementation="sdpa",
            ignore_mismatched_sizes=bool(head),
            output_loading_info=True,
            **_LOCAL,
        )
    except (OSError, ValueError, KeyError, TypeError, RuntimeError, SafetensorError) as broken:
        raise _unusable(folder, broken) from broken
    names = {str(each[0] if isinstance(each, tuple) else each) for each in found["mismatched_keys"]}
    absent = sorted(names | set(found["missing_keys"]))
    wrong = [name for name in absent if name.partition(".")[0] not in head]
    if wrong:
        raise DatasetError(
            f"{folder.name} lacks {len(wrong)} of the model's tensors, such as {wrong[0]}."
            " Fix: give the folder of a whole model of this kind"
        )
    return LoadedBase(model, tuple(absent))


def _storage(dtype: str, head: tuple[str, ...]) -> dict[str, Any]:
    """How transformers shall hold parameters."""
    if dtype != FOUR_BIT:
        return {"dtype": getattr(torch, dtype)}
    if importlib.util.find_spec("bitsandbytes") is None:
        raise DatasetError(
            'options.base_dtype = "4bit" needs bitsandbytes, which is not installed.'
            " Fix: pip install 'hypergpu[hf4bit]' on the nodes and the coordinator"
        )
    has_bf16 = torch.cuda.is_available() and torch.cuda.is_bf16_supported()
    quantized = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_compute_dtype=torch.bfloat16 if has_bf16 else torch.float32,
        llm_int8_skip_modules=list(head) or None,
    )
    return {"dtype": torch.float32, "quantization_config": quantized}


def _unusable(folder: Path, broken: Exception) -> DatasetError:
    text = " ".join(str(broken).split())[:300]
    return DatasetError(f"{folder.name} cannot be loaded by transformers: {text}")

"""A folder's model as files of layers, once its architecture is known to bear it."""

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from hypergpu.rings.stage_work import CutSizes
from hypergpu.workloads.finetuning.base_model import check_settings, check_task, load_config
from hypergpu.workloads.finetuning.rows import CONFIG
from hypergpu.workloads.slices.architecture_check import check_architecture
from hypergpu.workloads.slices.layer_blobs import Source, SourceTensors, write_blobs
from hypergpu.workloads.slices.layer_slice import SliceError
from hypergpu.workloads.slices.model_sizes import model_sizes


def cut_model(folder: Path, dtype: str, out: Path | None, weights: Path | None = None) -> CutSizes:
    """Check a model's architecture and write its layers, one after another.

    Args:
        folder: The model's, as transformers saves it.
        dtype: What its parameters are to be held as.
        out: Folder of the files; None: nothing is written, and no weight is needed.
        weights: A GGUF file that has the weights; None: the folder has them.

    Raises:
        SliceError: The model cannot be cut, with the reason.
        DatasetError: Its settings are none that may be loaded.
        GgufRefusalError: The GGUF file cannot be read as the folder's model.
        OSError: A file cannot be read or written.
    """
    if not (folder / CONFIG).is_file():
        raise SliceError(f"{folder.name} holds no {CONFIG}. Fix: give the folder of a model")
    for path in sorted(folder.glob("*.json")):
        check_settings(path)
    config = load_config(folder)
    check_task(AutoModelForCausalLM, config, "write text")
    check = check_architecture(config)
    if check.reason:
        raise SliceError(check.reason)
    sizes = model_sizes(config, dtype)
    if out is not None:
        source = _source_of(folder, weights, dtype)
        out.mkdir(exist_ok=True)
        for _ in write_blobs(config, source, out):
            pass
    return sizes


def _source_of(folder: Path, weights: Path | None, dtype: str) -> Source:
    if weights is not None:
        from hypergpu.workloads.gguf.reading import GgufTensors

        return GgufTensors(weights, getattr(torch, dtype))
    paths = sorted(folder.glob("*.safetensors"))
    if not paths:
        raise SliceError(
            f"{folder.name} holds no *.safetensors. Fix: save it with save_pretrained(folder)"
        )
    return SourceTensors(paths)

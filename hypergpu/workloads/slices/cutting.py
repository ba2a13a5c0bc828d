"""A folder's model as files of layers, once its architecture is known to bear it."""

from pathlib import Path

from transformers import AutoModelForCausalLM

from hypergpu.rings.stage_work import CutSizes
from hypergpu.workloads.finetuning.base_model import check_settings, check_task, load_config
from hypergpu.workloads.finetuning.rows import CONFIG
from hypergpu.workloads.slices.architecture_check import check_architecture
from hypergpu.workloads.slices.layer_blobs import SourceTensors, write_blobs
from hypergpu.workloads.slices.layer_slice import SliceError
from hypergpu.workloads.slices.model_sizes import model_sizes


def cut_model(folder: Path, dtype: str, out: Path | None) -> CutSizes:
    """Check a model's architecture and write its layers, one after another.

    Args:
        folder: The model's, as transformers saves it.
        dtype: What its parameters are to be held as.
        out: Folder of the files; None: nothing is written, and no weight is needed.

    Raises:
        SliceError: The model cannot be cut, with the reason.
        DatasetError: Its settings are none that may be loaded.
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
        paths = sorted(folder.glob("*.safetensors"))
        if not paths:
            raise SliceError(
                f"{folder.name} holds no *.safetensors. Fix: save it with save_pretrained(folder)"
            )
        out.mkdir(exist_ok=True)
        for _ in write_blobs(config, SourceTensors(paths), out):
            pass
    return sizes

"""`python -m hypergpu.workloads.finetuning.export EXPORT FOLDER` writes what others load of a
trained adapter: ``adapter/`` for peft, and ``merged/``, a whole model for transformers.
"""

import json
import os
import re
import sys
from pathlib import Path
from typing import Any, NamedTuple

from hypergpu.workloads.datasets import DatasetError
from hypergpu.workloads.finetuning.row_files import BASE_FOLDER, BASE_NAME_FILE
from hypergpu.workloads.networks.exported import (
    ExportError,
    TrainedModel,
    export_options,
    load_export,
)
from hypergpu.workloads.registry import BuilderMissingError, UnknownWorkloadError

_CARD = "README.md"
_NAME_MOST = 200
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}", re.ASCII)
_SHARD_BYTES = "4GB"
_MERGED_MOST = 1e-3
"""Largest difference of outputs, of the largest output, between a merged model and its adapter."""


class AdapterFolders(NamedTuple):
    """What was written."""

    adapter: Path
    """peft's files, loaded onto the base by ``PeftModel.from_pretrained``."""
    merged: Path
    """Weights, settings and tokenizer, loaded by ``from_pretrained`` of transformers."""


def write_folders(export: Path, data_dir: str) -> AdapterFolders:
    """Write both beside an export.

    Args:
        export: What `hypergpu job export` wrote.
        data_dir: The job's folder of data, with its base.

    Raises:
        ExportError: The export is no adapter of this base.
        DatasetError: The folder has no base that can be loaded.
    """
    # Merged into a base of four bits, an adapter would be rounded to them.
    is_rounded = export_options(export).get("base_dtype") == "4bit"
    trained_model = load_export(
        export, data_dir, **({"base_dtype": "float32"} if is_rounded else {})
    )
    folders = AdapterFolders(export / "adapter", export / "merged")
    _save(trained_model, folders)
    return folders


def base_name(folder: Path) -> str:
    """What peft is to load a base by: its name on the hub where that is known, else ``base``.

    Never a path of this machine, which says nothing elsewhere.
    """
    try:
        return (folder / BASE_NAME_FILE).read_text("utf-8").strip()[:_NAME_MOST]
    except (OSError, UnicodeDecodeError):
        pass
    try:
        settings = json.loads((folder / "config.json").read_bytes())
    except (OSError, ValueError):
        return BASE_FOLDER
    name = str(settings.get("_name_or_path", "")) if isinstance(settings, dict) else ""
    return name if _HUB_NAME.fullmatch(name) else BASE_FOLDER


def _save(trained: TrainedModel, folders: AdapterFolders) -> None:
    from hypergpu.workloads.finetuning.adapters import AdaptedModule

    if not isinstance(trained.model, AdaptedModule):
        raise ExportError(f"workload {trained.name} trains a whole model: load.py loads it")
    adapted_model = trained.model.adapted
    adapted_model.peft_config["default"].base_model_name_or_path = base_name(
        trained.workload.folder
    )
    adapted_model.save_pretrained(folders.adapter, save_embedding_layers=False)
    merged_base = merged_model(trained)
    merged_base.save_pretrained(folders.merged, max_shard_size=_SHARD_BYTES)
    for folder, library in zip(folders, ("peft", "transformers"), strict=True):
        trained.workload.save_reader(folder)
        (folder / _CARD).write_text(_card(trained, folders, library), encoding="utf-8")


def merged_model(trained: TrainedModel) -> Any:
    """The base with the adapter added to its weights, which gives what both gave apart.

    Raises:
        ExportError: It does not: some part of the base uses weights in a way that peft passes over.
    """
    adapted_model = trained.model.adapted
    before = trained.workload.trial_logits(trained.model)
    untie_adapted(adapted_model)
    merged_base = adapted_model.merge_and_unload(safe_merge=True)
    merged_base.tie_weights()  # As loading does: what is still tied is alike.
    after = trained.workload.trial_logits(lambda **inputs: merged_base(**inputs).logits)
    worst = float((after - before).abs().max() / before.abs().max().clamp_min(1e-6))
    if not worst <= _MERGED_MOST:
        raise ExportError(
            f"merged into {type(merged_base).__name__} the adapter gives other outputs,"
            f" by {worst:.1g}"
            " of the largest: merged/ is not written. Fix: load adapter/ with peft onto the base"
        )
    return merged_base


def untie_adapted(adapted: Any) -> None:
    """Give each layer with an adapter weights of its own, where others share them: merged into a
    tied head an adapter would change the embedding, too.
    """
    from peft.tuners.tuners_utils import BaseTunerLayer

    layers = [each for each in adapted.modules() if isinstance(each, BaseTunerLayer)]
    merged_ids = {id(each) for layer in layers for each in layer.get_base_layer().parameters()}
    seen_ids: set[int] = set()
    shared_ids: set[int] = set()
    for _, _, parameter in _parameter_places(adapted):
        (shared_ids if id(parameter) in seen_ids else seen_ids).add(id(parameter))
    if not merged_ids & shared_ids:
        return
    for module, name, parameter in _parameter_places(adapted):
        if id(parameter) in shared_ids:
            # All are parted, since one setting of the model's ties all or none.
            own = type(parameter)(parameter.detach().clone(), requires_grad=False)
            setattr(module, name, own)
    base = adapted.get_base_model()
    for config in (base.config, base.config.get_text_config()):
        config.tie_word_embeddings = False


def _parameter_places(model: Any) -> list[tuple[Any, str, Any]]:
    """Every module that has a parameter of its own, with its name there."""
    return [
        (module, name, parameter)
        for module in model.modules()
        for name, parameter in module.named_parameters(recurse=False)
    ]


def _card(trained: TrainedModel, folders: AdapterFolders, library: str) -> str:
    """The export's card, with how this folder is loaded and front matter for a hub."""
    from huggingface_hub import ModelCardData

    auto = trained.workload.auto.__name__
    front = ModelCardData(
        library_name=library,
        pipeline_tag=trained.workload.pipeline,
        tags=["hypergpu", "lora"],
        base_model_relation="adapter" if library == "peft" else "merge",
    )
    loading_code = f'model = {auto}.from_pretrained("FOLDER")'
    if library == "peft":
        loading_code = f'base = {auto}.from_pretrained("BASE")\n'
        loading_code += 'model = PeftModel.from_pretrained(base, "FOLDER")'
    whole = folders.merged.parent / _CARD
    text = whole.read_text("utf-8") if whole.exists() else f"# {trained.name}\n"
    text = text.partition("## Use")[0] + "## Settings" + text.partition("## Settings")[2]
    return f"---\n{front.to_yaml()}\n---\n\n{text}\n## Load\n\n```python\n{loading_code}\n```\n"


def main() -> int:
    """Write both folders; gives the process's exit status."""
    if len(sys.argv) != 3:
        sys.stderr.write("usage: python -m hypergpu.workloads.finetuning.export EXPORT FOLDER\n")
        return 2
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # before transformers is imported
    try:
        folders = write_folders(Path(sys.argv[1]), sys.argv[2])
    except (ExportError, DatasetError, BuilderMissingError, UnknownWorkloadError) as error:
        sys.stderr.write(f"error: {error}\n")
        return 1
    sys.stdout.write(f"{folders.adapter}  for peft\n{folders.merged}  for transformers\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

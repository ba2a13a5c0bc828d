"""The folder of a base on this machine. Importing this imports no torch."""

from pathlib import Path

from hypergpu.errors import HyperGPUError, Reason
from hypergpu.workloads.finetuning.row_files import BASE_FOLDER, BASE_NAME_FILE

GGUF_SUFFIX = ".gguf"
BASE_PATTERNS = ("*.json", "*.safetensors", "*.jinja", "*.txt", "*.model")
"""Files of a base: settings, weights and what the tokenizer needs; never code."""


def find_model(model: str | Path) -> Path:
    """A GGUF file, or the folder of a model that is on this machine.

    Raises:
        HyperGPUError: It is not.
    """
    path = Path(model).expanduser()
    is_gguf = path.suffix.lower() == GGUF_SUFFIX and path.is_file()
    return path if is_gguf else find_base(model, allow_hub=False)


def find_base(base: str | Path, *, allow_hub: bool) -> Path:
    """The folder of a base.

    Raises:
        HyperGPUError: It is not on this machine, and may not be downloaded.
    """
    folder = Path(base).expanduser()
    if folder.is_dir():
        return folder.resolve()
    if folder.suffix.lower() == GGUF_SUFFIX and folder.is_file():
        fix = f"make a folder of it: hypergpu convert {base} -o FOLDER"
        raise _unusable_base(base, "it is a GGUF file", fix)
    try:
        from huggingface_hub import snapshot_download
    except ModuleNotFoundError:
        raise _unusable_base(base, "it is no folder", "pip install 'hypergpu[hf]'") from None
    try:
        base_folder = snapshot_download(
            str(base), allow_patterns=list(BASE_PATTERNS), local_files_only=not allow_hub
        )
    except (OSError, ValueError) as error:
        text = str(error).partition("\n")[0][:200]
        fix = "give a folder" if allow_hub else "give a folder, or allow_hub=True to download it"
        raise _unusable_base(base, text, fix) from error
    return Path(base_folder)


def _unusable_base(base: str | Path, why: str, fix: str) -> HyperGPUError:
    return HyperGPUError(Reason.FILE_UNUSABLE, f"base {base} cannot be used: {why}", fix=fix)


def link_base(base: Path, job: Path) -> None:
    """Make a base's files a part of a job's folder, without copying them."""
    (job / BASE_FOLDER).mkdir()
    for path in sorted(base.iterdir()):
        if any(path.match(pattern) for pattern in BASE_PATTERNS):
            (job / BASE_FOLDER / path.name).symlink_to(path.resolve())
    if name := hub_name(base):
        (job / BASE_FOLDER / BASE_NAME_FILE).write_text(name, encoding="utf-8")


def hub_name(folder: Path) -> str:
    """Name on the hub of a model in the hub's cache; empty: it lies elsewhere."""
    kind, _, name = folder.parent.parent.name.partition("--")
    is_cached = kind == "models" and folder.parent.name == "snapshots"
    return name.replace("--", "/", 1) if is_cached else ""

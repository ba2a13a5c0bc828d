"""The folder of a base on this machine. Importing this imports no torch."""

from pathlib import Path

from hypergpu.errors import HyperGPUError, Reason

BASE_PATTERNS = ("*.json", "*.safetensors", "*.jinja", "*.txt", "*.model")
"""Files of a base: settings, weights and what the tokenizer needs; never code."""


def find_base(base: str | Path, *, allow_hub: bool) -> Path:
    """The folder of a base.

    Raises:
        HyperGPUError: It is not on this machine, and may not be downloaded.
    """
    folder = Path(base).expanduser()
    if folder.is_dir():
        return folder.resolve()
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

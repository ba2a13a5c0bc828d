"""Exports on a hub of models, by the hub's own library."""

from pathlib import Path
from typing import Any, NamedTuple

from hypergpu.errors import HyperGPUError, Reason

_PATTERNS = (
    *("*.safetensors", "*.json", "*.jinja", "*.txt", "*.model", "load.py"),
    *("program/*.json", "program/*.safetensors"),
)
"""Files of an export; what else lies in its folder stays."""
_CARD = "README.md"


class PublishOrder(NamedTuple):
    """A folder to publish, and its place on the hub."""

    folder: Path
    """An export, or its ``adapter`` or ``merged``."""
    repository: str
    """``owner/name``."""
    is_private: bool = False
    license: str = ""
    """As the hub names it, such as ``apache-2.0``; empty: what the card has."""
    base_model: str = ""
    """The base's name on the hub; empty: what the card has."""


def publish_export(order: PublishOrder) -> str:
    """Push an export in one commit and return its address. The token is the hub's library's own:
    ``HF_TOKEN``, or what `hf auth login` stored.

    Raises:
        HyperGPUError: The folder is no export, or the hub refuses.
    """
    try:
        import huggingface_hub
        from huggingface_hub.errors import HfHubHTTPError, HFValidationError
    except ModuleNotFoundError:
        detail, fix = "publishing needs huggingface_hub", "pip install 'hypergpu[hf]'"
        raise HyperGPUError(Reason.REQUEST_INVALID, detail, fix=fix) from None
    files = _files(order.folder)
    card = card_text(order).encode()
    operations: list[Any] = [huggingface_hub.CommitOperationAdd(_CARD, card)]
    operations += (
        huggingface_hub.CommitOperationAdd(path.relative_to(order.folder).as_posix(), path)
        for path in files
    )
    name = order.repository
    try:
        api = huggingface_hub.HfApi()
        api.create_repo(name, private=order.is_private, exist_ok=True)
        commit = api.create_commit(name, operations, commit_message="Publish by HyperGPU")
    except (HfHubHTTPError, HFValidationError, OSError, ValueError) as error:
        text = " ".join(str(error).split())[:300]
        raise HyperGPUError(
            Reason.REQUEST_INVALID,
            f"the hub did not take {name}: {text}",
            fix="log in with hf auth login, and name a repository of yours as OWNER/NAME",
        ) from error
    return str(commit.repo_url)


def card_text(order: PublishOrder) -> str:
    """The export's card with front matter that the hub reads.

    Raises:
        HyperGPUError: There is no card.
    """
    import huggingface_hub

    try:
        text = (order.folder / _CARD).read_text("utf-8")
    except OSError as error:
        raise _no_export(order.folder) from error
    card: Any = huggingface_hub.ModelCard(text, ignore_metadata_errors=True)
    card.data.tags = sorted({*(card.data.tags or []), "hypergpu"})
    if order.license:
        card.data.license = order.license
    if order.base_model:
        card.data.base_model = order.base_model
    return str(card)


def _files(folder: Path) -> list[Path]:
    files = sorted({path for pattern in _PATTERNS for path in folder.glob(pattern)})
    if not any(path.suffix == ".safetensors" for path in files):
        raise _no_export(folder)
    return files


def _no_export(folder: Path) -> HyperGPUError:
    return HyperGPUError(
        Reason.FILE_UNUSABLE,
        f"{folder} has no card with safetensors",
        fix="hypergpu job export JOB -o FOLDER writes them; hypergpu job merge its merged/",
    )

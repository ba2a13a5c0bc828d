"""The folder of a bundle's base, laid out from its blobs, and the model that was loaded from it."""

import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, Generic, NamedTuple, TypeVar

import msgspec
import torch

from gpu_node.shell.worker.farm.folder_files import index_content, lay_out_folder
from gpu_node.shell.worker.protocol import DoWork
from gpu_node.shell.worker.trainer import ShardError
from hypergpu.errors import HyperGPUError
from hypergpu.farm.base_files import BASE_INDEX, WEIGHTS_SUFFIX, read_base_index
from hypergpu.farm.bundles import Bundle
from hypergpu.workloads.datasets import DatasetError
from hypergpu.workloads.finetuning.base_model import check_settings
from hypergpu.workloads.networks.task import chosen_device

_MODULES = "modules.json"
"""File in which sentence-transformers names the classes of a model's modules."""
_LIBRARY = "sentence_transformers."
_DTYPES = ("float32", "bfloat16", "float16")
_Model = TypeVar("_Model")


class KeptModel(Generic[_Model]):
    """The model of the newest bundle, for the next ones that need the same.

    Args:
        load: Loads a model from its folder, the parameters and the device.
    """

    def __init__(self, load: Callable[[Path, Mapping[str, Any], torch.device], _Model]) -> None:
        self._load = load
        self._key = ""
        self._model: _Model | None = None

    def of(self, request: DoWork, bundle: Bundle) -> _Model:
        """The model of a bundle.

        Raises:
            ShardError: The base cannot be used here.
        """
        key = msgspec.json.encode([bundle.files, bundle.parameters], order="sorted").decode()
        if self._model is None or self._key != key:
            self._model = None  # frees the last model before the next takes memory
            device = torch.device(chosen_device().kind)
            with tempfile.TemporaryDirectory(prefix="base-") as folder:
                try:
                    lay_out_base(request, bundle, Path(folder))
                    self._model = self._load(Path(folder), bundle.parameters, device)
                except DatasetError as error:
                    raise ShardError(str(error)) from error
                except HyperGPUError as error:
                    raise ShardError(error.message) from error
            self._key = key
        return self._model


class BaseSettings(NamedTuple):
    """What parameters say of how a base is held."""

    dtype: str = "float32"

    @classmethod
    def of(cls, parameters: Mapping[str, Any]) -> "BaseSettings":
        """Those that parameters state.

        Raises:
            ShardError: They state a type that no base is held in.
        """
        dtype = str(parameters.get("dtype", "float32"))
        if dtype not in _DTYPES:
            raise ShardError(f"dtype {dtype!r} is none of {', '.join(_DTYPES)}")
        return cls(dtype)


def lay_out_base(request: DoWork, bundle: Bundle, folder: Path) -> None:
    """Make the folder of a base from the bundle's files. Weights are linked, not copied.

    Raises:
        ShardError: The bundle has no base.
        HyperGPUError: MANIFEST_INVALID, its index is not right.
        DatasetError: It names code of its own, or holds no weights.
    """
    index = read_base_index(index_content(request, bundle, BASE_INDEX, "base"))
    lay_out_folder(request, bundle, index, folder)
    _check_base(folder, index.paths)


def _check_base(folder: Path, paths: Sequence[str]) -> None:
    """Refuse a base that names code, before a library reads it."""
    if not any(PurePosixPath(path).suffix == WEIGHTS_SUFFIX for path in paths):
        raise DatasetError(
            f"the base holds no *{WEIGHTS_SUFFIX}. Fix: save the model with"
            " save_pretrained(folder), which writes them; other formats are not loaded"
        )
    for path in sorted(folder.rglob("*.json")):
        check_settings(path)
    modules = folder / _MODULES
    if modules.exists():
        _check_modules(modules)


def _check_modules(path: Path) -> None:
    class SentenceModule(msgspec.Struct):
        type: str

    try:
        modules = msgspec.json.decode(path.read_bytes(), type=list[SentenceModule])
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise DatasetError(f"{_MODULES} of the base is malformed: {error}") from error
    for module in modules:
        if not module.type.startswith(_LIBRARY):
            raise DatasetError(
                f"{_MODULES} of the base names {module.type[:80]!r}, which is no module of"
                " sentence-transformers and is never loaded. Fix: take a base without it"
            )

"""A model's files for nodes that hold some of its layers each.

Importing this imports no torch: the model is cut by a process of its own.
"""

import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import msgspec

from hypergpu.errors import HyperGPUError, Reason
from hypergpu.farm.base_files import BASE_INDEX, WEIGHTS_SUFFIX, is_base_file
from hypergpu.rings.stage_work import CutSizes, LayerSpeed, ModelCut
from hypergpu.user.farm.folder_parts import FolderNames, folder_files, folder_parts

_CUT = "hypergpu.workloads.slices"
_WEIGHTS_INDEX = "model.safetensors.index.json"


class StageFiles(NamedTuple):
    """Files of a model that is cut, by their names in a request."""

    paths: dict[str, Path]
    sizes: CutSizes

    def cut(self, stages: int, codec: str) -> ModelCut:
        """The cut into so many stages."""
        return self.sizes.cut(stages, codec)


class _Model(NamedTuple):
    """A model as it is cut."""

    name: str
    """Its file or folder, for people."""
    folder: Path
    """Has settings and tokenizer."""
    gguf_file: Path | None
    """Has the weights; None: the folder has them."""


@contextmanager
def _open_model(path: Path) -> Iterator[_Model]:
    """A model's folder, or a GGUF file, whose settings are written for as long."""
    if not path.is_file():
        yield _Model(str(path), path, None)
        return
    with tempfile.TemporaryDirectory(prefix="hypergpu-gguf-") as scratch:
        _output(str(path), "--settings", str(path), scratch)
        yield _Model(str(path), Path(scratch), path)


def read_sizes(path: Path, dtype: str) -> CutSizes:
    """Sizes of a model: its ``config.json`` or the header of a GGUF file is enough.

    Raises:
        HyperGPUError: FILE_UNUSABLE, it cannot be cut, with the reason.
    """
    with _open_model(path) as model:
        return _cut(model, dtype)


def write_stage_files(path: Path, scratch: Path, dtype: str) -> StageFiles:
    """Write a file for each layer; they take as much room as the model, held as its type.

    Args:
        path: The model's folder, or a GGUF file.
        scratch: That exists, and stays until the files were sent.
        dtype: What parameters are to be held as.

    Raises:
        HyperGPUError: FILE_UNUSABLE, the model cannot be cut, with the reason.
    """
    layers = scratch / "layers"
    with _open_model(path) as model:
        sizes = _cut(model, dtype, layers)
        files = {
            name: file
            for name, file in folder_files(model.folder, is_base_file).items()
            if not name.endswith(WEIGHTS_SUFFIX) and name != _WEIGHTS_INDEX
        }
        names = FolderNames(f"the model {path}", "settings", "leave out what no tokenizer needs")
        parts = folder_parts(files, names)
        large_files = {
            name: _keep_file(file, model, scratch) for name, file in parts.large_files.items()
        }
    index = scratch / BASE_INDEX
    index.write_bytes(parts.index_content)
    paths = {file.name: file for file in sorted(layers.iterdir())}
    return StageFiles({BASE_INDEX: index, **large_files, **paths}, sizes)


def _keep_file(file: Path, model: _Model, scratch: Path) -> Path:
    """A file that stays once the folder of a GGUF file's settings is gone."""
    return file if model.gguf_file is None else Path(shutil.copy2(file, scratch / file.name))


def read_speed(path: Path, dtype: str) -> LayerSpeed:
    """How fast this machine computes the model's layers: its ``config.json`` is enough, or the
    header of a GGUF file.

    Raises:
        HyperGPUError: FILE_UNUSABLE, it cannot be measured, with the reason.
    """
    with _open_model(path) as model:
        content = _output(model.name, "--speed", str(model.folder), dtype)
    return msgspec.json.decode(content, type=LayerSpeed)


def _cut(model: _Model, dtype: str, out: Path | None = None) -> CutSizes:
    arguments = [str(model.folder), dtype]
    if out is not None:
        arguments += [str(out), *([] if model.gguf_file is None else [str(model.gguf_file)])]
    return msgspec.json.decode(_output(model.name, *arguments), type=CutSizes)


def _output(name: str, *arguments: str) -> str:
    command = [sys.executable, "-m", _CUT, *arguments]
    process = subprocess.run(command, check=False, capture_output=True, text=True)
    if process.returncode:
        last_line = process.stderr.strip().rpartition("\n")[2]
        reason, _, fix = last_line.removeprefix("error: ").partition(" Fix: ")
        detail = f"{name} cannot be cut into stages: {reason}"
        raise HyperGPUError(Reason.FILE_UNUSABLE, detail, fix=fix or "serve it whole")
    return process.stdout

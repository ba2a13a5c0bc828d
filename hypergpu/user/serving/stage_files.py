"""A model's files for nodes that hold some of its layers each.

Importing this imports no torch: the model is cut by a process of its own.
"""

import subprocess
import sys
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


def read_sizes(folder: Path, dtype: str) -> CutSizes:
    """Sizes of a model: its ``config.json`` is enough.

    Raises:
        HyperGPUError: FILE_UNUSABLE, it cannot be cut, with the reason.
    """
    return _run(folder, dtype)


def write_stage_files(folder: Path, scratch: Path, dtype: str) -> StageFiles:
    """Write a file for each layer; they take as much room as the model.

    Args:
        folder: The model's.
        scratch: That exists, and stays until the files were sent.
        dtype: What parameters are to be held as.

    Raises:
        HyperGPUError: FILE_UNUSABLE, the model cannot be cut, with the reason.
    """
    layers = scratch / "layers"
    sizes = _run(folder, dtype, str(layers))
    files = {
        name: path
        for name, path in folder_files(folder, is_base_file).items()
        if not name.endswith(WEIGHTS_SUFFIX) and name != _WEIGHTS_INDEX
    }
    names = FolderNames(f"the model {folder}", "settings", "leave out what no tokenizer needs")
    parts = folder_parts(files, names)
    index = scratch / BASE_INDEX
    index.write_bytes(parts.index_content)
    paths = {path.name: path for path in sorted(layers.iterdir())}
    return StageFiles({BASE_INDEX: index, **parts.large_files, **paths}, sizes)


def read_speed(folder: Path, dtype: str) -> LayerSpeed:
    """How fast this machine computes the model's layers: its ``config.json`` is enough.

    Raises:
        HyperGPUError: FILE_UNUSABLE, it cannot be measured, with the reason.
    """
    content = _output(folder, "--speed", str(folder), dtype)
    return msgspec.json.decode(content, type=LayerSpeed)


def _run(folder: Path, dtype: str, *out: str) -> CutSizes:
    return msgspec.json.decode(_output(folder, str(folder), dtype, *out), type=CutSizes)


def _output(folder: Path, *arguments: str) -> str:
    command = [sys.executable, "-m", _CUT, *arguments]
    process = subprocess.run(command, check=False, capture_output=True, text=True)
    if process.returncode:
        last_line = process.stderr.strip().rpartition("\n")[2]
        reason, _, fix = last_line.removeprefix("error: ").partition(" Fix: ")
        detail = f"{folder} cannot be cut into stages: {reason}"
        raise HyperGPUError(Reason.FILE_UNUSABLE, detail, fix=fix or "serve it whole")
    return process.stdout

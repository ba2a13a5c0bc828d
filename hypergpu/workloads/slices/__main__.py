"""What users' programs ask of models that are cut, each as a process of its own.

``python -m hypergpu.workloads.slices FOLDER DTYPE [OUT]`` tells sizes of a model as JSON, and
writes a file for each of its layers, which it has checked to give what the whole model gives.
``python -m hypergpu.workloads.slices --speed FOLDER DTYPE`` tells how fast its layers are.
"""

import os
import sys
from pathlib import Path

import msgspec

from hypergpu.workloads.datasets import DatasetError

_SPEED = "--speed"


def main(arguments: list[str]) -> int:
    """Tell and write; gives the process's exit status."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # before transformers is imported
    try:
        from hypergpu.workloads.slices.layer_slice import SliceError
    except ModuleNotFoundError as error:
        sys.stderr.write(f"error: {error.name} is missing. Fix: pip install 'hypergpu[hf]'\n")
        return 1
    is_speed = arguments[:1] == [_SPEED]
    if len(arguments) not in ({3} if is_speed else {2, 3}):
        usage = "python -m hypergpu.workloads.slices FOLDER DTYPE [OUT]"
        sys.stderr.write(f"usage: {usage}, or --speed FOLDER DTYPE\n")
        return 2
    try:
        result = _speed(*arguments[1:]) if is_speed else _sizes(*arguments)
    except (SliceError, DatasetError, OSError, RuntimeError) as error:
        sys.stderr.write(f"error: {error}\n")
        return 1
    sys.stdout.write(msgspec.json.encode(result).decode() + "\n")
    return 0


def _sizes(folder: str, dtype: str, out: str = "") -> msgspec.Struct:
    from hypergpu.workloads.slices.cutting import cut_model

    return cut_model(Path(folder), dtype, Path(out) if out else None)


def _speed(folder: str, dtype: str) -> msgspec.Struct:
    from hypergpu.workloads.slices.layer_speed import layer_speed

    return layer_speed(Path(folder), dtype)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

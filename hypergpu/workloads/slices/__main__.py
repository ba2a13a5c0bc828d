"""`python -m hypergpu.workloads.slices FOLDER DTYPE [OUT]` tells sizes of a model as JSON, and
writes a file for each of its layers, which it has checked to give what the whole model gives.
"""

import os
import sys
from pathlib import Path

import msgspec

from hypergpu.workloads.datasets import DatasetError


def main(arguments: list[str]) -> int:
    """Tell and write; gives the process's exit status."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # before transformers is imported
    try:
        from hypergpu.workloads.slices.cutting import cut_model
        from hypergpu.workloads.slices.layer_slice import SliceError
    except ModuleNotFoundError as error:
        sys.stderr.write(f"error: {error.name} is missing. Fix: pip install 'hypergpu[hf]'\n")
        return 1
    if len(arguments) not in {2, 3}:
        sys.stderr.write("usage: python -m hypergpu.workloads.slices FOLDER DTYPE [OUT]\n")
        return 2
    out = Path(arguments[2]) if arguments[2:] else None
    try:
        sizes = cut_model(Path(arguments[0]), arguments[1], out)
    except (SliceError, DatasetError, OSError) as error:
        sys.stderr.write(f"error: {error}\n")
        return 1
    sys.stdout.write(msgspec.json.encode(sizes).decode() + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

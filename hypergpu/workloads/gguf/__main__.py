"""`python -m hypergpu.workloads.gguf FOLDER FILE [TYPE]` writes a model of transformers as GGUF."""

import os
import sys
from pathlib import Path

from hypergpu.workloads.datasets import DatasetError
from hypergpu.workloads.gguf.refusal import GgufRefusalError


def main(arguments: list[str]) -> int:
    """Write the file; gives the process's exit status."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # before transformers is imported
    try:
        from hypergpu.workloads.gguf.writing import NUMBER_TYPES, write_gguf
    except ModuleNotFoundError as error:
        sys.stderr.write(f"error: {error.name} is missing. Fix: pip install 'hypergpu[gguf,hf]'\n")
        return 1
    if len(arguments) not in {2, 3} or arguments[2:] not in (
        [],
        *([each] for each in NUMBER_TYPES),
    ):
        kinds = "|".join(NUMBER_TYPES)
        sys.stderr.write(f"usage: python -m hypergpu.workloads.gguf FOLDER FILE [{kinds}]\n")
        return 2
    try:
        written_file = write_gguf(Path(arguments[0]), Path(arguments[1]), *arguments[2:])
    except (GgufRefusalError, DatasetError, OSError) as error:
        sys.stderr.write(f"error: {error}\n")
        return 1
    millions = written_file.parameters / 1e6
    sys.stdout.write(
        f"{written_file.path}  {written_file.architecture}, {millions:.1f} million parameters\n"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

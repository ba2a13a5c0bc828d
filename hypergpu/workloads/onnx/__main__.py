"""`python -m hypergpu.workloads.onnx EXPORT FILE DATA` writes an export's program as ONNX."""

import sys
from pathlib import Path

from hypergpu.workloads.datasets import DatasetError


def main(arguments: list[str]) -> int:
    """Write the file; gives the process's exit status."""
    if len(arguments) != 3:
        sys.stderr.write("usage: python -m hypergpu.workloads.onnx EXPORT FILE DATA\n")
        return 2
    try:
        from hypergpu.workloads.onnx.writing import OnnxRefusalError, write_onnx
    except ModuleNotFoundError as error:
        sys.stderr.write(f"error: {error.name} is missing. Fix: pip install 'hypergpu[onnx]'\n")
        return 1
    try:
        written_file = write_onnx(Path(arguments[0]), Path(arguments[1]), arguments[2])
    except (OnnxRefusalError, DatasetError, OSError) as error:
        sys.stderr.write(f"error: {error}\n")
        return 1
    outputs = ", ".join(written_file.outputs)
    sys.stdout.write(
        f"{written_file.path}  gives {outputs}; differs from torch by"
        f" {written_file.largest_error:.1g} at most\n"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

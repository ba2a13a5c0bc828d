"""`python -m hypergpu.workloads.gguf FOLDER FILE [TYPE]` writes a model of transformers as GGUF;
`--read FILE FOLDER DTYPE` writes a GGUF file as transformers has it.
"""

import os
import shutil
import sys
from pathlib import Path

from hypergpu.workloads.datasets import DatasetError
from hypergpu.workloads.gguf.refusal import GgufRefusalError

_READ = "--read"
_DTYPES = ("float32", "bfloat16", "float16")


def main(arguments: list[str]) -> int:
    """Write the file or the folder; gives the process's exit status."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # before transformers is imported
    try:
        from hypergpu.workloads.gguf.writing import NUMBER_TYPES
    except ModuleNotFoundError as error:
        sys.stderr.write(f"error: {error.name} is missing. Fix: pip install 'hypergpu[gguf,hf]'\n")
        return 1
    try:
        match arguments:
            case [option, file, folder, dtype] if option == _READ and dtype in _DTYPES:
                _read(Path(file), Path(folder), dtype)
            case [folder, file]:
                _write(Path(folder), Path(file), NUMBER_TYPES[0])
            case [folder, file, kind] if kind in NUMBER_TYPES:
                _write(Path(folder), Path(file), kind)
            case _:
                kinds, dtypes = "|".join(NUMBER_TYPES), "|".join(_DTYPES)
                usage = f"python -m hypergpu.workloads.gguf FOLDER FILE [{kinds}]"
                sys.stderr.write(f"usage: {usage}, or {_READ} FILE FOLDER {dtypes}\n")
                return 2
    except (GgufRefusalError, DatasetError, OSError) as error:
        sys.stderr.write(f"error: {error}\n")
        return 1
    return 0


def _write(folder: Path, file: Path, kind: str) -> None:
    from hypergpu.workloads.gguf.writing import write_gguf

    written_file = write_gguf(folder, file, kind)
    millions = written_file.parameters / 1e6
    sys.stdout.write(
        f"{written_file.path}  {written_file.architecture}, {millions:.1f} million parameters\n"
    )


def _read(file: Path, folder: Path, dtype: str) -> None:
    """Write the folder: it is there whole, or not at all."""
    import torch
    from tqdm import tqdm

    from hypergpu.workloads.gguf.reading import write_folder

    part = folder.with_name(f".{folder.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    try:
        written_files = write_folder(file, part, getattr(torch, dtype))
        size_bytes = sum(
            path.stat().st_size for path in tqdm(written_files, unit=" layers", disable=None)
        )
        part.rename(folder)
    finally:
        shutil.rmtree(part, ignore_errors=True)
    sys.stdout.write(f"{folder}  {size_bytes / 1e9:.2f} GB of weights as {dtype}\n")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

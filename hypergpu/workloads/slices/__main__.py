"""What users' programs ask of models that are cut, each as a process of its own.

``python -m hypergpu.workloads.slices FOLDER DTYPE [OUT [FILE.gguf]]`` tells sizes of a model as
JSON, and writes a file for each of its layers, which it has checked to give what the whole model
gives; a GGUF file may have the weights. In place of these ``--speed FOLDER DTYPE`` tells how fast
its layers are, and ``--settings FILE.gguf FOLDER`` writes settings and tokenizer of a GGUF file.
"""

import os
import sys
from pathlib import Path

import msgspec

from hypergpu.workloads.datasets import DatasetError
from hypergpu.workloads.gguf.refusal import GgufRefusalError

_SPEED, _SETTINGS = "--speed", "--settings"


def main(arguments: list[str]) -> int:
    """Tell and write; gives the process's exit status."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # before transformers is imported
    try:
        from hypergpu.workloads.slices.layer_slice import SliceError
    except ModuleNotFoundError as error:
        return _fail_without(error)
    try:
        result = _answer(arguments)
    except ModuleNotFoundError as error:
        return _fail_without(error)
    except (SliceError, GgufRefusalError, DatasetError, OSError, RuntimeError) as error:
        sys.stderr.write(f"error: {error}\n")
        return 1
    if result is None:
        usage = "python -m hypergpu.workloads.slices FOLDER DTYPE [OUT [FILE.gguf]]"
        others = f"{_SPEED} FOLDER DTYPE or {_SETTINGS} FILE.gguf FOLDER"
        sys.stderr.write(f"usage: {usage}, {others}\n")
        return 2
    sys.stdout.write(result + "\n")
    return 0


def _fail_without(error: ModuleNotFoundError) -> int:
    extras = "gguf,hf" if error.name == "gguf" else "hf"
    sys.stderr.write(f"error: {error.name} is missing. Fix: pip install 'hypergpu[{extras}]'\n")
    return 1


def _answer(arguments: list[str]) -> str | None:
    """Gives what is told of a call; None: it is no call."""
    match arguments:
        case [option, path, folder] if option == _SETTINGS:
            _write_settings(path, folder)
            return ""
        case [option, folder, dtype] if option == _SPEED:
            return _text(_speed(folder, dtype))
        case [_, _] | [_, _, _] | [_, _, _, _]:
            return _text(_sizes(*arguments))
        case _:
            return None


def _text(value: msgspec.Struct) -> str:
    return msgspec.json.encode(value).decode()


def _write_settings(path: str, folder: str) -> None:
    from hypergpu.workloads.gguf.reading import GgufTensors

    GgufTensors(Path(path)).write_settings(Path(folder))


def _sizes(folder: str, dtype: str, out: str = "", weights: str = "") -> msgspec.Struct:
    from hypergpu.workloads.slices.cutting import cut_model

    weights_path = Path(weights) if weights else None
    return cut_model(Path(folder), dtype, Path(out) if out else None, weights_path)


def _speed(folder: str, dtype: str) -> msgspec.Struct:
    from hypergpu.workloads.slices.layer_speed import layer_speed

    return layer_speed(Path(folder), dtype)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

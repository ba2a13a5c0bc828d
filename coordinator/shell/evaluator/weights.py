"""Weights of a user or of another job as a job's first model."""

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from hypergpu.errors import HyperGPUError, Reason
from hypergpu.ids import Digest
from hypergpu.tensors.layout import Flat, Layout, unpack

_NAMES_MOST = 5
_TYPES = {
    np.dtype(np.float32): ("BF16", "F16", "F32", "F64"),
    np.dtype(np.int64): ("I64", "I32", "I16", "I8", "U8", "BOOL"),
}
"""Types that a tensor is read from, by its own. Each value is the same in both."""
_BFLOAT16 = "BF16"
_PARALLEL = "module."
"""What ``nn.DataParallel`` puts before each name."""
_CONVERT = {
    np.dtype(np.float32): "tensor.float()",
    np.dtype(np.int64): "tensor.long()",
}


def read_model(path: Path, layout: Layout, made_with: Digest) -> Flat:
    """Read another job's model.

    Raises:
        HyperGPUError: SPEC_INVALID, it is of another layout, or not finite.
    """
    if made_with != layout.digest:
        raise _unusable(
            "the model of that job has other tensors than this job's",
            "set the workload and options of that job",
        )
    return _require_finite(Flat.view(layout, np.fromfile(path, np.uint8)))


def read_named_tensors(path: Path, layout: Layout) -> Flat:
    """Read a safetensors file that has just the tensors of a layout.

    Raises:
        HyperGPUError: SPEC_INVALID, it is no such file, lacks tensors or has others, or holds
            shapes, types or values that a model cannot have; with the names.
    """
    flat = Flat.empty(layout)
    try:
        with safe_open(path, "np") as file:
            stored_names = _plain_names(set(file.keys()), {spec.name for spec in layout.tensors})
            _require_names({spec.name for spec in layout.tensors}, set(stored_names))
            halves = _bfloat16_tensors(path)
            for name, target in unpack(layout, flat).items():
                part = file.get_slice(stored_names[name])
                if (kind := part.get_dtype()) not in _TYPES[target.dtype]:
                    raise _unusable(
                        f"{name} is {kind}, and the job's is {target.dtype}",
                        f"save the file with {_CONVERT[target.dtype]} of that tensor",
                    )
                _require_shape(name, part.get_shape(), target.shape)
                with np.errstate(over="ignore"):  # What is beyond float32 is told below.
                    if kind == _BFLOAT16:
                        target[...] = halves(stored_names[name]).reshape(target.shape)
                    else:
                        target[...] = file.get_tensor(stored_names[name])
    except (SafetensorError, OSError) as error:
        raise _unusable(
            f"the file is no safetensors file: {error}",
            "write it with safetensors.torch.save_file(model.state_dict(), path)",
        ) from error
    return _require_finite(flat)


def _plain_names(names: set[str], wanted: set[str]) -> dict[str, str]:
    """Names in the file by those of the job, without what a wrapper put before all of them."""
    if names - wanted and all(name.startswith(_PARALLEL) for name in names):
        return {name.removeprefix(_PARALLEL): name for name in names}
    return {name: name for name in names}


def _bfloat16_tensors(path: Path) -> Callable[[str], NDArray[np.float32]]:
    """A reader of tensors of bfloat16 as float32, which numpy lacks: their upper halves."""
    octets = np.memmap(path, np.uint8, mode="r")
    header_bytes = int.from_bytes(octets[:8].tobytes(), "little")
    # safe_open has checked the header, its offsets and its size.
    header = msgspec.json.decode(octets[8 : 8 + header_bytes].tobytes())

    def read(name: str) -> NDArray[np.float32]:
        start, end = (8 + header_bytes + offset for offset in header[name]["data_offsets"])
        halves = np.frombuffer(octets[start:end].tobytes(), "<u2").astype(np.uint32)
        return (halves << np.uint32(16)).view(np.float32)

    return read


def _require_names(wanted: set[str], found: set[str]) -> None:
    if missing_names := wanted - found:
        raise _unusable(
            f"the file lacks {_some(missing_names)} of the job's model",
            "save the state_dict of a model of the job's workload and options",
        )
    if others := found - wanted:
        raise _unusable(
            f"the file has {_some(others)}, which the job's model has not", "leave them out"
        )


def _require_shape(name: str, found: Sequence[int], wanted: Sequence[int]) -> None:
    if tuple(found) != tuple(wanted):
        raise _unusable(
            f"{name} is {list(found)} in the file and {list(wanted)} in the job",
            "set the options that the weights were trained with",
        )


def _require_finite(flat: Flat) -> Flat:
    if np.isfinite(flat.parameters).all() and np.isfinite(flat.statistics).all():
        return flat
    raise _unusable(
        "the weights hold values that are not finite numbers", "take weights that do not"
    )


def _some(names: Iterable[str]) -> str:
    first, *others = sorted(names)
    shown_names = ", ".join([first, *others[: _NAMES_MOST - 1]])
    hidden_count = len(others) - _NAMES_MOST + 1
    return shown_names if hidden_count <= 0 else f"{shown_names} and {hidden_count} more tensors"


def _unusable(what: str, fix: str) -> HyperGPUError:
    return HyperGPUError(Reason.SPEC_INVALID, f"init in [model] cannot be used: {what}", fix=fix)

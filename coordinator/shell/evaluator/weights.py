"""Weights of a user or of another job as a job's first model."""

from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open

from hypergpu.errors import HyperGPUError, Reason
from hypergpu.ids import Digest
from hypergpu.tensors.layout import Flat, Layout, unpack

_NAMES_MOST = 5
_TYPES = {np.dtype(np.float32): ("F16", "F32", "F64"), np.dtype(np.int64): ("I64",)}
"""Types that a tensor is read from, by its own."""


def read_model(path: Path, layout: Layout, made_with: Digest) -> Flat:
    """Read another job's model.

    Raises:
        HyperGPUError: SPEC_INVALID, it is of another layout, or not finite.
    """
    if made_with != layout.digest:
        raise _unusable("the model of that job has other tensors than this job's")
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
            _require_names({spec.name for spec in layout.tensors}, set(file.keys()))
            for name, target in unpack(layout, flat).items():
                stored = file.get_slice(name)
                if (kind := stored.get_dtype()) not in (usable := _TYPES[target.dtype]):
                    what = f"what can be read there is {', '.join(usable)}"
                    raise _unusable(f"{name} is {kind}; {what}")
                _require_shape(name, stored.get_shape(), target.shape)
                with np.errstate(over="ignore"):  # What is beyond float32 is told below.
                    target[...] = file.get_tensor(name)
    except SafetensorError as broken:
        raise _unusable(f"the file is no safetensors file: {broken}") from broken
    return _require_finite(flat)


def _require_names(wanted: set[str], found: set[str]) -> None:
    if lacking := wanted - found:
        raise _unusable(f"the file lacks {_some(lacking)} of the job's model")
    if others := found - wanted:
        raise _unusable(f"the file has {_some(others)}, which the job's model has not")


def _require_shape(name: str, found: Sequence[int], wanted: Sequence[int]) -> None:
    if tuple(found) != tuple(wanted):
        raise _unusable(f"{name} is {list(found)} in the file and {list(wanted)} in the job")


def _require_finite(flat: Flat) -> Flat:
    if np.isfinite(flat.parameters).all() and np.isfinite(flat.statistics).all():
        return flat
    raise _unusable("the weights hold values that are not finite numbers")


def _some(names: Iterable[str]) -> str:
    first, *others = sorted(names)
    shown = ", ".join([first, *others[: _NAMES_MOST - 1]])
    hidden = len(others) - _NAMES_MOST + 1
    return shown if hidden <= 0 else f"{shown} and {hidden} more tensors"


def _unusable(what: str) -> HyperGPUError:
    return HyperGPUError(Reason.SPEC_INVALID, f"init in [model] cannot be used: {what}")

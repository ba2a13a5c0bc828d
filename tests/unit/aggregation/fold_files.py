"""Files for a fold, and what a fold of them should give, computed whole and by torch."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from blake3 import blake3
from msgspec.structs import replace

from coordinator.shell.aggregation.fold_request import (
    FoldRequest,
    FoldResult,
    StoredBlob,
    StoredUpdate,
)
from hypergpu.ids import Digest
from hypergpu.jobfile.spec import Outer
from hypergpu.tensors.codec import decode_update, encode_update
from hypergpu.tensors.layout import Flat, Float32s, Layout, TensorKind, TensorSpec, layout_of

LAYOUT = layout_of(
    (
        TensorSpec("weight", (37, 701)),
        TensorSpec("bias", (301,)),
        TensorSpec("mean", (5,), TensorKind.STATISTIC),
        TensorSpec("steps", (2,), TensorKind.INTEGER),
    )
)


class FoldSetting(NamedTuple):
    """A fold's settings."""

    up: str | tuple[str, ...] = "int4"
    """One codec, or one for each slot in turn."""
    down: str = "int4"
    outer: Outer = Outer()

    def codec_of(self, slot: int) -> str:
        """How a slot's update is encoded."""
        return self.up if isinstance(self.up, str) else self.up[slot % len(self.up)]


def random_flat(seed: int, magnitude: float = 1.0, layout: Layout = LAYOUT) -> Flat:
    """Vectors of the layout from a seed."""
    generator = np.random.default_rng(seed)
    factor = np.float32(magnitude)
    return Flat(
        generator.standard_normal(layout.parameters_count, np.float32) * factor,
        generator.standard_normal(layout.statistics_count, np.float32) * factor,
        generator.integers(0, 2**40, layout.integers_count),
    )


def write_blob(path: Path, content: bytes) -> StoredBlob:
    """Write a file and name its content."""
    path.write_bytes(content)
    return StoredBlob(path, Digest(blake3(content).hexdigest()))


def first_request(
    folder: Path, samples: Sequence[int], setting: FoldSetting, seed: int = 0
) -> FoldRequest:
    """A request for the first outer step, with one update for each sample count."""
    base = write_blob(folder / "base", b"".join(part.tobytes() for part in random_flat(seed)))
    updates: list[StoredUpdate] = []
    for slot, count in enumerate(samples):
        flat = random_flat(seed + slot + 1, 0.01)
        codec = setting.codec_of(slot)
        payload = encode_update(LAYOUT, codec, flat).payload.tobytes()
        blob = write_blob(folder / f"update-{slot}", payload)
        updates.append(StoredUpdate(blob.path, blob.digest, count, codec))
    outputs = folder / "outputs"
    outputs.mkdir(exist_ok=True)
    return FoldRequest(
        layout=LAYOUT,
        down=setting.down,
        outer=setting.outer,
        base_model=base,
        outer_state=None,
        updates=tuple(updates),
        output_dir=outputs,
    )


def model_of(path: Path) -> Flat:
    """Read a model file."""
    return Flat.view(LAYOUT, np.fromfile(path, np.uint8))


def updates_of(request: FoldRequest) -> list[Flat]:
    """Decode a request's updates, whole."""
    return [
        decode_update(request.layout, update.codec, update.path.read_bytes())
        for update in request.updates
    ]


def mean_of(vectors: Sequence[Float32s], samples: Sequence[int]) -> Float32s:
    """Sample-weighted mean in float64."""
    weights = np.array(samples, np.float64) / sum(samples)
    mean: Float32s = (weights @ np.array(vectors, np.float64)).astype(np.float32)
    return mean


def torch_steps(start: Float32s, means: Sequence[Float32s], outer: Outer) -> Float32s:
    """Parameters after torch's own Nesterov SGD took the means as gradients."""
    parameter = torch.from_numpy(start.copy()).requires_grad_()
    optimizer = torch.optim.SGD(
        [parameter], outer.learning_rate, outer.momentum, nesterov=outer.momentum > 0
    )
    for mean in means:
        parameter.grad = torch.from_numpy(mean.copy())
        optimizer.step()
    stepped_values: Float32s = parameter.detach().numpy()
    return stepped_values


def next_request(request: FoldRequest, result: FoldResult) -> FoldRequest:
    """The same updates again, on top of a result."""
    state = result.outer_state
    return replace(
        request,
        base_model=StoredBlob(result.model.path, result.model.digest),
        outer_state=StoredBlob(state.path, state.digest) if state else None,
    )

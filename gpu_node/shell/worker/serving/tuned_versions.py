"""Versions of a training's model that a replica holds, and how it takes up the next one.

An answer ends on the version that it began with, so that no answer is of mixed weights: the base is
held once, and each version's adapter as tensors of its own, which a pass puts in place.
"""

import shutil
import tempfile
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from gpu_node.shell.worker.protocol import DoWork
from gpu_node.shell.worker.serving.transformers_model import TransformersModel
from gpu_node.shell.worker.trainer import ShardError
from hypergpu.digests import digest_of_file
from hypergpu.serving.tuned_model import VERSIONS_KEPT, VersionOffer
from hypergpu.tensors.codec import ApplyError, apply_delta
from hypergpu.tensors.layout import Flat, Layout, LayoutError, unpack


class AdapterWeights(NamedTuple):
    """The trained tensors of one version."""

    parameters: Sequence[nn.Parameter]
    """Those of the module, in whose place a version's values are put."""
    values: Sequence[Tensor]

    def put(self) -> None:
        """Let the module compute with this version."""
        for parameter, value in zip(self.parameters, self.values, strict=True):
            parameter.data = value


class VersionFiles:
    """Adapters of versions as flat files: the newest one is what a delta is applied to.

    Args:
        request: Whose inputs hold blobs.
        layout: Of the adapter.
    """

    def __init__(self, request: DoWork, layout: Layout) -> None:
        self._request = request
        self._layout = layout
        self._folder = Path(tempfile.mkdtemp(prefix="versions-"))
        weakref.finalize(self, shutil.rmtree, self._folder, ignore_errors=True)
        self._newest: tuple[str, Path] | None = None
        """Digest and file of the newest version."""

    def take(self, offer: VersionOffer) -> Flat:
        """The adapter of a version, whose blob is among the inputs.

        Raises:
            ShardError: The blob is not there, or not what leads to the version.
        """
        version = offer.version
        path = self._folder / f"{version.round}-{version.blob.digest}"
        try:
            digest = self._write(offer, path)
            if digest != version.blob.digest:
                raise ShardError(f"what was sent is not the model of round {version.round}")
            flat = Flat.view(self._layout, np.fromfile(path, np.uint8))
        except (OSError, ApplyError, LayoutError, ValueError) as error:
            path.unlink(missing_ok=True)
            raise ShardError(f"version {version.round} cannot be read: {error}") from error
        if self._newest is not None and self._newest[1] != path:
            self._newest[1].unlink(missing_ok=True)
        self._newest = version.blob.digest, path
        return flat

    def _write(self, offer: VersionOffer, path: Path) -> str:
        delta = offer.delta
        if delta is None:
            content = self._request.input_path(offer.version.blob).read_bytes()
            path.write_bytes(content)
            return digest_of_file(path)
        if self._newest is None or self._newest[0] != delta.base:
            raise ShardError("the delta is of another version than the one that is here")
        difference = self._request.input_path(delta.blob)
        return apply_delta(
            self._newest[1], difference, path, layout=self._layout, codec=delta.codec
        )


class TunedVersions:
    """The newest versions of one model.

    Args:
        model: With the module's parameters as they were loaded.
        parameters: Those that the training changes, by their names in the layout.
        layout: Of the adapter.
        files: Give the adapters.
    """

    def __init__(
        self,
        model: TransformersModel,
        parameters: dict[str, nn.Parameter],
        layout: Layout,
        files: VersionFiles,
    ) -> None:
        self._model = model
        self._parameters = parameters
        self._layout = layout
        self._files = files
        self._models: dict[int, TransformersModel] = {}

    @property
    def rounds(self) -> tuple[int, ...]:
        """Rounds of the versions, the newest last."""
        return tuple(self._models)

    def model(self, version: int | None) -> TransformersModel | None:
        """The model at a version, or at the newest one; None: it is not here."""
        return self._models.get(self.rounds[-1] if version is None else version)

    def take_up(self, offer: VersionOffer) -> None:
        """Load a version. Older ones than the last two go once no answer needs them.

        Raises:
            ShardError: It cannot be loaded.
            MemoryError: There is none left for it.
        """
        arrays = unpack(self._layout, self._files.take(offer))
        try:
            values = [
                torch.from_numpy(np.array(arrays[name])).to(parameter.device, parameter.dtype)
                for name, parameter in self._parameters.items()
            ]
        except torch.OutOfMemoryError as error:
            raise MemoryError(str(error)) from error
        weights = AdapterWeights(tuple(self._parameters.values()), values)
        self._models[offer.version.round] = self._model.with_weights(weights.put)
        kept_models = [*self._models.items()][-VERSIONS_KEPT:]
        self._models = dict(kept_models)


def trained_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """Parameters of a module that a training changes."""
    return {name: each for name, each in module.named_parameters() if each.requires_grad}

"""How images become inputs of a base: size, channels and scale as its folder states them."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch
from torch import Tensor
from transformers import PreTrainedConfig

from hypergpu.workloads.datasets import DatasetError
from hypergpu.workloads.networks.image_decoding import ImageForm

_SIDE = 224
"""Side where neither configuration nor preprocessor states one, as transformers has it."""
_SIDE_MOST = 4096


class _Preprocessor(msgspec.Struct, frozen=True):
    """The part of the base's file that says how pixels become its inputs."""

    image_mean: float | tuple[float, ...] | None = None
    image_std: float | tuple[float, ...] | None = None
    do_normalize: bool | None = True
    do_rescale: bool | None = True
    rescale_factor: float | None = 1 / 255
    size: Any = None
    crop_size: Any = None
    do_center_crop: bool | None = None


class PixelRules(NamedTuple):
    """From stored pixels to a base's inputs."""

    form: ImageForm
    scale: float
    """Factor of values of 0 to 255."""
    mean: tuple[float, ...]
    deviation: tuple[float, ...]

    def inputs(self, images: Tensor) -> Tensor:
        """``float[b, channels, height, width]`` of ``uint8`` ones."""
        shape = (1, -1, 1, 1)
        mean, deviation = (
            torch.tensor(each, device=images.device).view(shape)
            for each in (self.mean, self.deviation)
        )
        return (images.float() * self.scale - mean) / deviation


def pixel_rules(path: Path, config: PreTrainedConfig) -> PixelRules:
    """What a base's configuration and the preprocessor's file beside it state.

    Raises:
        DatasetError: The file cannot be read, or states what images here cannot become.
    """
    try:
        content = path.read_bytes() if path.exists() else b"{}"
        read = msgspec.json.decode(content, type=_Preprocessor)
    except (OSError, msgspec.DecodeError) as error:
        raise DatasetError(
            f"base/{path.name} cannot be read: {error}."
            " Fix: save it anew with save_pretrained of the base's image processor"
        ) from error
    vision = getattr(config, "vision_config", None) or config
    channels = getattr(vision, "num_channels", 3)
    if channels not in {1, 3}:
        raise DatasetError(
            f"base takes images of {channels} channels, and image files here have 3 or 1."
            " Fix: give a base with num_channels 3"
        )
    height, width = _sides(read, vision)
    means = _values(path, "image_mean", read.image_mean, channels)
    deviations = _values(path, "image_std", read.image_std, channels)
    if not read.do_normalize:
        means, deviations = (0.0,) * channels, (1.0,) * channels
    factor = read.rescale_factor if read.rescale_factor is not None else 1 / 255
    scale = factor if read.do_rescale or read.do_rescale is None else 1.0
    return PixelRules(ImageForm(height, width, channels), scale, means, deviations)


def _sides(read: _Preprocessor, vision: Any) -> tuple[int, int]:
    """Height and width: the configuration's, else what images are cropped or resized to."""
    sizes = [getattr(vision, "image_size", None)]
    sizes += [read.crop_size, read.size] if read.do_center_crop is not False else [read.size]
    for each in sizes:
        if sides := _two_sides(each):
            return sides
    return _SIDE, _SIDE


def _two_sides(size: Any) -> tuple[int, int] | None:
    if isinstance(size, Mapping):
        edge = size.get("shortest_edge")
        size = [size.get("height", edge), size.get("width", edge)]
    if isinstance(size, int) and not isinstance(size, bool):
        size = [size, size]
    if not isinstance(size, Sequence) or isinstance(size, str) or not 1 <= len(size) <= 2:
        return None
    if not all(isinstance(side, int) and 0 < side <= _SIDE_MOST for side in size):
        return None
    return size[0], size[-1]


def _values(
    path: Path, name: str, given: float | Sequence[float] | None, channels: int
) -> tuple[float, ...]:
    """A value for each channel; one counts for all."""
    if given is None:
        return (0.5,) * channels
    values = tuple(given) if isinstance(given, Sequence) else (given,)
    if len(values) == 1:
        return values * channels
    if len(values) != channels:
        raise DatasetError(
            f"base/{path.name}: {name} has {len(values)} values and the base {channels} channels."
            f" Fix: give {name} {channels} values"
        )
    return values

"""An image file as pixels of one form: whole numbers of 0 to 255, whatever the file's mode."""

from io import BytesIO
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps

from hypergpu.workloads.datasets import DatasetError

_GREY_16 = frozenset({"I;16", "I;16L", "I;16B", "I;16N"})
_SIXTEEN_BITS = 65_535
_FLOAT_MOST = {1.0: 1.0, 255.0: 255.0, 65_535.0: 65_535.0}
"""Ranges of float images; the least that holds an image's values is taken."""


class ImageForm(NamedTuple):
    """Form of the pixels that a model takes."""

    height: int
    width: int
    channels: int = 3
    """3: red, green and blue; 1: grey."""

    @property
    def mode(self) -> str:
        """The name that Pillow has for it."""
        return "L" if self.channels == 1 else "RGB"


def decode_image(path: str, form: ImageForm) -> NDArray[np.uint8]:
    """``uint8[channels, height, width]``: the largest middle part of the form's shape, resized.

    It stands as its EXIF orientation says. Grey of 16 bits and floats are scaled by their range;
    palettes, CMYK and transparency become the form's colours, the latter on white.

    Raises:
        DatasetError: The file is no image, or its values have no range that is known.
    """
    return _decoded_image(path, path, form)


def decode_picture(content: bytes, form: ImageForm) -> NDArray[np.uint8]:
    """As `decode_image`, of the content of a file. Raises `DatasetError`."""
    return _decoded_image(BytesIO(content), "the picture", form)


def _decoded_image(source: str | BytesIO, path: str, form: ImageForm) -> NDArray[np.uint8]:
    try:
        with Image.open(source) as image:
            upright = ImageOps.exif_transpose(image)
            plain = _eight_bits(path, upright)
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        if isinstance(error, DatasetError):
            raise
        raise DatasetError(
            f"{path} is no image that can be read: {error}. Fix: remove or replace it"
        ) from error
    part = _middle(plain.convert(form.mode), form)
    resized_part = part.resize((form.width, form.height), Image.Resampling.BILINEAR)
    pixels: NDArray[np.uint8] = np.asarray(resized_part)
    return pixels[None] if form.channels == 1 else pixels.transpose(2, 0, 1)


def _middle(image: Image.Image, form: ImageForm) -> Image.Image:
    """The largest middle part that is as wide for its height as the form."""
    scale = min(image.width / form.width, image.height / form.height)
    width = max(1, min(image.width, round(form.width * scale)))
    height = max(1, min(image.height, round(form.height * scale)))
    left_px, top = (image.width - width) // 2, (image.height - height) // 2
    return image.crop((left_px, top, left_px + width, top + height))


def _eight_bits(path: str, image: Image.Image) -> Image.Image:
    """The image in a mode of eight bits a channel, without transparency."""
    if image.mode in _GREY_16 or image.mode in {"I", "F"}:
        return _scaled_grey(path, image)
    if image.mode == "P" or "transparency" in image.info:
        image = image.convert("RGBA")
    if image.mode in {"LA", "La"}:
        image = image.convert("RGBA")
    if image.mode in {"RGBA", "RGBa", "PA"}:
        colours = image.convert("RGBA")
        white = Image.new("RGBA", colours.size, (255, 255, 255, 255))
        return Image.alpha_composite(white, colours).convert("RGB")
    return image


def _scaled_grey(path: str, image: Image.Image) -> Image.Image:
    """Grey of more than eight bits, scaled to eight by what its type holds."""
    values = np.asarray(image).astype(np.float64)
    if not np.isfinite(values).all() or values.min() < 0 or values.max() > _SIXTEEN_BITS:
        raise DatasetError(
            f"{path} has the mode {image.mode} with values of {values.min():g} to"
            f" {values.max():g}, of which no range is known. Fix: save it with 8 or 16 bits"
        )
    most = float(_SIXTEEN_BITS)
    if image.mode == "F":
        most = min(each for each in _FLOAT_MOST if values.max() <= each)
    return Image.fromarray(np.round(values * (255 / most)).astype(np.uint8), "L")

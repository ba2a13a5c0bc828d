"""Whether two pictures are of the same noise and prompt, made on devices that round otherwise.

Equal pixels are too much to ask of unlike devices, and a small mean difference is too little: a
grey picture has it to any picture of little contrast. So the difference is measured in parts of the
contrast, over squares of a few pixels.
"""

import base64
import binascii
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hypergpu.farm.png_images import Pixels, PngError, png_pixels

DIFFERENCE_MOST = 0.3
"""Root mean square of the difference over that of the contrast. Two pictures that have nothing to
do with each other are at 1.4, a grey one and any other at 1.
"""
_SQUARE = 4
_CONTRAST_LEAST = 4.0
"""Contrast, of 255, that pictures of less are taken to have."""


def picture_pixels(value: Any) -> Pixels | None:
    """``uint8[height, width, 3]`` of an item's value; None: it is no picture."""
    text = value.get("image") if isinstance(value, dict) else None
    if not isinstance(text, str):
        return None
    try:
        return png_pixels(base64.b64decode(text, validate=True))
    except (PngError, binascii.Error, ValueError):
        return None


def are_like_pictures(one: Any, other: Any) -> bool:
    """Whether two values of items are pictures that look alike."""
    first, second = picture_pixels(one), picture_pixels(other)
    if first is None or second is None or first.shape != second.shape:
        return False
    small, other_small = _square_means(first), _square_means(second)
    difference = _spread(small - other_small)
    contrasts = (_spread(each - each.mean()) for each in (small, other_small))
    return difference <= DIFFERENCE_MOST * max(_CONTRAST_LEAST, *contrasts)


def _spread(values: NDArray[np.float64]) -> float:
    return float(np.sqrt(np.mean(values**2)))


def _square_means(pixels: Pixels) -> NDArray[np.float64]:
    """Means over squares; what is left of a square at the edges is cut off."""
    height, width = (max(1, side // _SQUARE) for side in pixels.shape[:2])
    step_y, step_x = (
        min(_SQUARE, pixels.shape[0]),
        min(_SQUARE, pixels.shape[1]),
    )
    part = pixels[: height * step_y, : width * step_x]
    squares = part.reshape(height, step_y, width, step_x, 3)
    means: NDArray[np.float64] = squares.mean(axis=(1, 3), dtype=np.float64)
    return means

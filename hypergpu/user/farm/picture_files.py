"""Pictures of an output: files in a folder beside it, named by the positions of their items."""

import base64
import binascii
from collections.abc import Mapping, Sequence
from typing import Any

from hypergpu.durable import SHARED, write_durably
from hypergpu.errors import HyperGPUError, Reason
from hypergpu.farm.png_images import PngError, png_size
from hypergpu.user.farm.output_folder import OutputFolder

_DIGITS = 6


def write_pictures(
    folder: OutputFolder, column: str, start: int, values: Sequence[Any]
) -> list[Any]:
    """Write the pictures of some items, durably; gives the values with names of files in their
    place, as they are beside the output.

    Args:
        folder: The output's.
        column: Field of a value that holds a picture, PNG in base64.
        start: Position of the first item.
        values: In order; None where an item has none.

    Raises:
        HyperGPUError: REQUEST_INVALID, a picture is none.
    """
    folder.pictures.mkdir(exist_ok=True)
    return [
        value
        if not isinstance(value, Mapping)
        else {**value, column: _write(folder, start + place, value.get(column))}
        for place, value in enumerate(values)
    ]


def _write(folder: OutputFolder, position: int, text: Any) -> str:
    try:
        content = base64.b64decode(text, validate=True)
        png_size(content)
    except (PngError, binascii.Error, TypeError, ValueError) as error:
        detail = f"the result of item {position} is no picture: {error}"
        raise HyperGPUError(Reason.REQUEST_INVALID, detail) from error
    name = f"{position:0{_DIGITS}}.png"
    write_durably(folder.pictures / name, content, mode=SHARED)
    return f"{folder.pictures_out.name}/{name}"

"""Pictures as samples of a program: decoded as trainings on folders of images decode them."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from gpu_node.shell.worker.farm.chunk_items import TextItem
from gpu_node.shell.worker.farm.picture_samples import is_picture, picture_content
from gpu_node.shell.worker.trainer import ShardError
from hypergpu.programs.container import Program
from hypergpu.workloads.datasets import DatasetError
from hypergpu.workloads.networks.image_decoding import ImageForm, decode_picture

_CHANNELS = frozenset({1, 3})


class PictureSamples:
    """Items that are pictures. Implements `BundleSamples`; one batch is decoded at a time.

    Args:
        items: Those of a bundle.
        program: Its only field is ``uint8[channels, height, width]``.

    Raises:
        ShardError: The program takes something else.
    """

    def __init__(self, items: Sequence[TextItem], program: Program) -> None:
        self._items = items
        self._form = picture_form(program)
        self.errors: dict[int, str] = {}

    def batch(self, first: int, items: int) -> list[NDArray[np.uint8]]:
        """See `BundleSamples`."""
        chosen_items = self._items[first : first + items]
        pixels = [self._pixels(first + place, item) for place, item in enumerate(chosen_items)]
        return [np.stack(pixels)]

    def _pixels(self, place: int, item: TextItem) -> NDArray[np.uint8]:
        content, error = b"", item.error
        if not error and not is_picture(item):
            error = "the item is no picture"
        if not error:
            content, error = picture_content(item)
        if not error:
            try:
                return decode_picture(content, self._form)
            except DatasetError as reason:
                error = str(reason).partition(" Fix: ")[0]
        self.errors[place] = error
        form = self._form
        return np.zeros((form.channels, form.height, form.width), np.uint8)


def picture_form(program: Program) -> ImageForm:
    """The form of the pictures that a program takes.

    Raises:
        ShardError: It takes none.
    """
    fields = program.fields
    is_one = len(fields) == 1 and fields[0].dtype == "uint8" and len(fields[0].shape) == 3
    if not is_one or fields[0].shape[0] not in _CHANNELS:
        forms = ", ".join(f"{each.name}: {each.dtype}{list(each.shape)}" for each in fields)
        raise ShardError(f"pictures are uint8[1 or 3, height, width], the program takes {forms}")
    channels, height, width = fields[0].shape
    return ImageForm(height, width, channels)

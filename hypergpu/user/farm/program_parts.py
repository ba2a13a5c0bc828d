"""A module of the user's own and its arrays as the items and files of a farm job."""

import base64
import contextlib
import itertools
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from hypergpu.errors import HyperGPUError, Reason
from hypergpu.programs.container import ProgramError
from hypergpu.programs.samples import FieldArrays, SamplesError, stored_array
from hypergpu.user.farm.input_chunks import write_array_chunks, write_text_chunks
from hypergpu.user.farm.item_rules import ItemForm
from hypergpu.user.farm.items import ItemFields, ItemSource
from hypergpu.user.farm.picture_items import is_picture_folder
from hypergpu.user.farm.starting import JobParts, MapOrder
from hypergpu.user.training.datasets import DataSource
from hypergpu.workloads.datasets import DatasetError

if TYPE_CHECKING:
    from hypergpu.workloads.networks.forward_program import ForwardProgram
    from hypergpu.workloads.networks.image_decoding import ImageForm
    from hypergpu.workloads.networks.tracing import Module

_PICTURE_FORM = {"height": 224, "width": 224, "channels": 3}
"""Form of pictures where the parameters state no other."""
_SIDE_MOST = 4_096
_EXAMPLES = 3
"""Pictures that a module is traced with."""


def program_parts(module: "Module", order: MapOrder, folder: Path) -> JobParts:
    """Items that are arrays, and the program of a module.

    Raises:
        HyperGPUError: The module cannot be traced, or the data cannot be used.
    """
    # Imported here: it needs torch, which takes seconds.
    from hypergpu.workloads.networks.forward_program import forward_program

    if is_picture_folder(order.data):
        return _picture_parts(module, order, folder)
    if order.settings.parameters:
        names = ", ".join(order.settings.parameters)
        detail = f"{names}: only pictures have a size, and the data are no folder of them"
        raise HyperGPUError(Reason.ARGUMENT_INVALID, detail, fix="leave parameters out")
    with _translate_program_errors():
        batches = DataSource(order.data, "data").batches
        first = next(_program_batches(batches(), 0), None)
        if first is None:
            return JobParts(write_array_chunks([], folder), {})
        program = forward_program(module, first)
        items = write_array_chunks(_program_batches(batches(), order.limit), folder)
    return JobParts(items, _program_files(program, folder))


def _program_files(program: "ForwardProgram", folder: Path) -> dict[str, Path]:
    files = {name: folder / name for name in ("program", "tensors")}
    files["program"].write_bytes(program.program)
    files["tensors"].write_bytes(program.tensors)
    return files


def _picture_parts(module: "Module", order: MapOrder, folder: Path) -> JobParts:
    """Items that are the pictures of a folder, which nodes decode, and the program of a module."""
    from hypergpu.workloads.networks.forward_program import forward_program

    form = _picture_form(order.settings.parameters)
    source = ItemSource(order.data, ItemForm.TEXT_OR_PICTURE, ItemFields())
    chosen_items = itertools.islice(source.items(), order.limit or None)
    items = write_text_chunks(chosen_items, folder)
    contents = (base64.b64decode(each.value["image"]) for each in source.items() if not each.error)
    pixels = list(itertools.islice(_readable_pictures(contents, form), _EXAMPLES))
    if not pixels:
        detail = f"no picture in {order.data} can be read"
        raise HyperGPUError(Reason.FILE_UNUSABLE, detail, fix="give at least one that can")
    with _translate_program_errors():
        program = forward_program(module, {"image": np.stack(pixels)})
    return JobParts(items, _program_files(program, folder))


def _readable_pictures(contents: Iterable[bytes], form: "ImageForm") -> Iterator[NDArray[np.uint8]]:
    """Pixels of the pictures that can be read: nodes tell the others by item."""
    from hypergpu.workloads.networks.image_decoding import decode_picture

    for content in contents:
        with contextlib.suppress(DatasetError):
            yield decode_picture(content, form)


def _picture_form(parameters: Mapping[str, Any]) -> "ImageForm":
    """What pictures become before the module gets them.

    Raises:
        HyperGPUError: ARGUMENT_INVALID, a size is none that may be.
    """
    from hypergpu.workloads.networks.image_decoding import ImageForm

    values = {**_PICTURE_FORM, **parameters}
    height, width, channels = (values[name] for name in _PICTURE_FORM)
    is_size = all(type(each) is int and 0 < each <= _SIDE_MOST for each in (height, width))
    if not is_size or channels not in (1, 3):
        detail = f"pictures of height {height}, width {width} and {channels} channels"
        fix = f"parameters take height and width of 1 to {_SIDE_MOST}, and 1 or 3 channels"
        raise HyperGPUError(Reason.ARGUMENT_INVALID, detail, fix=fix)
    return ImageForm(height, width, channels)


def _program_batches(batches: Iterator[FieldArrays], limit: int) -> Iterator[Mapping[str, Any]]:
    """Batches as programs take them, of ``limit`` items in all unless that is 0."""
    count = 0
    for batch in batches:
        size = len(next(iter(batch.values())))
        kept_size = min(size, limit - count) if limit else size
        if kept_size <= 0:
            return
        count += kept_size
        yield {
            name: np.asarray(stored_array("data", name, array[:kept_size]))
            for name, array in batch.items()
        }


@contextlib.contextmanager
def _translate_program_errors() -> Iterator[None]:
    """Raise errors of programs and samples as those of HyperGPU."""
    try:
        yield
    except (ProgramError, SamplesError) as error:
        detail, _, fix = str(error).partition(" Fix: ")
        raise HyperGPUError(
            Reason.ARGUMENT_INVALID, detail.rstrip("."), fix=fix or "see docs/farm.md"
        ) from error

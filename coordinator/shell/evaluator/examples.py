"""Examples of held-out samples and the model's output for them, bounded for the journal.

They are for people alone: nothing that goes wrong with them fails a job or an evaluation.
"""

import struct
import zlib
from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np
import structlog

from coordinator.shell.evaluator.model_evaluator import EXAMPLES_MOST, ModelEvaluator
from hypergpu.tensors.layout import Flat
from hypergpu.workloads.datasets import Array
from hypergpu.workloads.entry import HeldOutExample
from hypergpu.workloads.examples import Example

TEXT_BYTES_MOST = 400
"""Most bytes of UTF-8 of the outputs of an evaluation together, and of an example's text."""
LABEL_BYTES_MOST = 40
SIDE_MOST = 32
_KEPT_BITS = np.uint8(0xF8)
"""Five bits a channel: a photograph of 32 x 32 pixels takes 1.4 kB in place of 2.4 kB."""

log = structlog.get_logger()

_Told = TypeVar("_Told")


def held_out_examples(model: ModelEvaluator) -> tuple[HeldOutExample, ...]:
    """The workload's examples; none where it shows none or fails to."""
    names = model.dataset.class_names

    def bounded_example(example: Example) -> HeldOutExample:
        return HeldOutExample(
            text=_clip(example.text, TEXT_BYTES_MOST),
            image=b"" if example.image is None else png(_reduce(example.image)),
            label=_clip(_class_text(example.label, names), LABEL_BYTES_MOST),
        )

    return _attempt(lambda: [bounded_example(each) for each in model.examples()[:EXAMPLES_MOST]])


def example_outputs(model: ModelEvaluator, flat: Flat) -> tuple[str, ...]:
    """A model's output for each example; none where the workload shows none or fails to."""
    names = model.dataset.class_names

    def bounded_outputs() -> list[str]:
        outputs = model.outputs(flat)[:EXAMPLES_MOST]
        bytes_most = TEXT_BYTES_MOST // max(len(outputs), 1)
        return [_clip(_class_text(each, names), bytes_most) for each in outputs]

    return _attempt(bounded_outputs)


def _attempt(show: Callable[[], Sequence[_Told]]) -> tuple[_Told, ...]:
    try:
        return tuple(show())
    except Exception as error:  # noqa: BLE001 - a workload may fail in any way, its job must not
        log.warning("the workload shows no examples", error=repr(error))
        return ()


def _class_text(value: int | str, names: tuple[str, ...]) -> str:
    if isinstance(value, int | np.integer) and 0 <= value < len(names):
        return names[value]
    return str(value)


def _clip(text: str, bytes_most: int) -> str:
    """The beginning of a text; a character that would be cut through is left out."""
    return text[:bytes_most].encode("utf-8", "replace")[:bytes_most].decode("utf-8", "ignore")


def _reduce(image: Array) -> Array:
    """``uint8[height, width, channels]`` of 32 pixels a side at most, means of squares of pixels.

    Raises:
        ValueError: The image has another type or shape than `Example` says.
    """
    if image.dtype != np.uint8 or image.ndim not in (2, 3) or image.shape[2:] not in ((), (3,)):
        shape = list(image.shape)
        raise ValueError(
            f"an image is {image.dtype}{shape}; it must be uint8[h, w] or uint8[h, w, 3]"
        )
    height, width = image.shape[:2]
    step = -(-max(height, width) // SIDE_MOST)
    rows, columns = max(height // step, 1), max(width // step, 1)
    squares = image[: rows * step, : columns * step].reshape(rows, step, columns, step, -1)
    reduced_image: Array = squares.mean(axis=(1, 3)).astype(np.uint8) & _KEPT_BITS
    return reduced_image


def png(pixels: Array) -> bytes:
    """``uint8[height, width, channels]`` of one grey or three colour channels as a PNG file."""
    height, width, channels = pixels.shape
    before = np.zeros_like(pixels)
    before[:, 1:] = pixels[:, :-1]
    # Filter 1: each byte less the one to its left, which compresses photographs better.
    lines = np.insert((pixels - before).reshape(height, -1), 0, 1, axis=1)
    header = struct.pack(">IIBBBBB", width, height, 8, 2 if channels == 3 else 0, 0, 0, 0)
    parts = ((b"IHDR", header), (b"IDAT", zlib.compress(lines.tobytes(), 9)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(_chunk(kind, content) for kind, content in parts)


def _chunk(kind: bytes, content: bytes) -> bytes:
    checksum = zlib.crc32(kind + content)
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", checksum)

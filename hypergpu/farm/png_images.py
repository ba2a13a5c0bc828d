"""Images as PNG of one form: eight bits of red, green and blue, each row as its difference to the
one above. Equal pixels give equal bytes with one version of zlib, and whoever reads them needs no
library that takes every form of PNG there is.
"""

import struct
import zlib
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

_SIGNATURE = b"\x89PNG\r\n\x1a\n"
_HEADER = struct.Struct(">IIBBBBB")
_FORM = (8, 2, 0, 0, 0)
"""Eight bits, red, green and blue, deflate, adaptive filters, no interlace."""
_CHUNK_HEAD, _CHUNK_SUM = 8, 4
_UP = 2
_LEVEL = 6
SIDE_MOST = 4096
Pixels = NDArray[np.uint8]


class PngError(ValueError):
    """Bytes are no image of this form. The text says why."""


class ImageSize(NamedTuple):
    """Pixels of an image."""

    width: int
    height: int


def png_bytes(pixels: Pixels) -> bytes:
    """``uint8[height, width, 3]`` as PNG."""
    height, width, _ = pixels.shape
    rows = pixels.reshape(height, width * 3)
    differences = rows.copy()
    differences[1:] -= rows[:-1]  # modulo 256, as PNG has it
    lines = np.concatenate([np.full((height, 1), _UP, np.uint8), differences], axis=1)
    header = _HEADER.pack(width, height, *_FORM)
    body = zlib.compress(lines.tobytes(), _LEVEL)
    parts = (_chunk(b"IHDR", header), _chunk(b"IDAT", body), _chunk(b"IEND", b""))
    return _SIGNATURE + b"".join(parts)


def _chunk(name: bytes, content: bytes) -> bytes:
    checksum = zlib.crc32(name + content)
    return struct.pack(">I", len(content)) + name + content + struct.pack(">I", checksum)


def png_size(content: bytes) -> ImageSize:
    """Width and height that the head of an image states.

    Raises:
        PngError: It is no image of this form, or larger than `SIDE_MOST` on a side.
    """
    start = len(_SIGNATURE) + _CHUNK_HEAD
    head = content[start : start + _HEADER.size]
    if not content.startswith(_SIGNATURE) or len(head) < _HEADER.size:
        raise PngError("it is no PNG")
    width, height, *form = _HEADER.unpack(head)
    if tuple(form) != _FORM:
        raise PngError("it is a PNG of another form than eight bits of red, green and blue")
    if not (0 < width <= SIDE_MOST and 0 < height <= SIDE_MOST):
        raise PngError(f"it has {width} x {height} pixels, and {SIDE_MOST} a side at most")
    return ImageSize(width, height)


def png_pixels(content: bytes) -> Pixels:
    """``uint8[height, width, 3]`` of an image, trusting nothing in it.

    Memory is bounded by the size that the head states, which is checked before.

    Raises:
        PngError: It is no image of this form.
    """
    width, height = png_size(content)
    start = len(_SIGNATURE) + _CHUNK_HEAD + _HEADER.size + _CHUNK_SUM
    body_bytes = int.from_bytes(content[start : start + 4], "big")
    body = content[start + _CHUNK_HEAD : start + _CHUNK_HEAD + body_bytes]
    header, end = _HEADER.pack(width, height, *_FORM), _chunk(b"IEND", b"")
    whole = _SIGNATURE + _chunk(b"IHDR", header) + _chunk(b"IDAT", body) + end
    if whole != content:
        raise PngError("its parts are not a head, one body and an end with right checksums")
    size_bytes = height * (1 + 3 * width)
    try:
        decoder = zlib.decompressobj()
        lines = decoder.decompress(body, size_bytes)
    except zlib.error as error:
        raise PngError("its body is damaged") from error
    if len(lines) != size_bytes or decoder.unconsumed_tail or not decoder.eof:
        raise PngError("its body is no image of the stated size")
    table = np.frombuffer(lines, np.uint8).reshape(height, 1 + 3 * width)
    if not (table[:, 0] == _UP).all():
        raise PngError("its rows are not differences to the ones above")
    pixels = np.add.accumulate(table[:, 1:], axis=0, dtype=np.uint8)
    return pixels.reshape(height, width, 3)

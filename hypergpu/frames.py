"""Length-prefixed messages over pipes and sockets between processes of one machine."""

from typing import TYPE_CHECKING, BinaryIO

if TYPE_CHECKING:
    import asyncio


FRAME_BYTES_MAX = 16 << 20


class FrameError(Exception):
    """The stream does not hold whole frames: it broke off, or something else wrote to it."""


def frame(payload: bytes) -> bytes:
    """The bytes to write for one message."""
    if len(payload) > FRAME_BYTES_MAX:
        raise FrameError(f"a message of {len(payload)} bytes is over the {FRAME_BYTES_MAX} allowed")
    return len(payload).to_bytes(4, "big") + payload


def _checked_size(head: bytes) -> int:
    size_bytes = int.from_bytes(head, "big")
    if size_bytes > FRAME_BYTES_MAX:
        raise FrameError(f"a frame announces {size_bytes} bytes: something else wrote to the pipe")
    return size_bytes


def read_frame(stream: BinaryIO) -> bytes | None:
    """Block for the next payload; None at a clean end of the stream.

    Raises:
        FrameError: The stream ended inside a frame, or a size is absurd.
    """
    head = stream.read(4)
    if not head:
        return None
    if len(head) < 4:
        raise FrameError("the stream ended inside a frame")
    size_bytes = _checked_size(head)
    payload = stream.read(size_bytes)
    if len(payload) < size_bytes:
        raise FrameError("the stream ended inside a frame")
    return payload


async def next_frame(reader: "asyncio.StreamReader") -> bytes | None:
    """`read_frame` for a pipe that asyncio owns."""
    from asyncio import IncompleteReadError  # a worker that must start fast has no use for it

    try:
        head = await reader.readexactly(4)
        return await reader.readexactly(_checked_size(head))
    except IncompleteReadError as error:
        if error.partial or error.expected != 4:
            raise FrameError("the stream ended inside a frame") from error
        return None

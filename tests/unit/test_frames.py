import asyncio
import io

import pytest

from hypergpu.wire.frames import FRAME_BYTES_MAX, FrameError, frame, next_frame, read_frame


def stream_of(octets: bytes) -> asyncio.StreamReader:
    reader = asyncio.StreamReader()
    reader.feed_data(octets)
    reader.feed_eof()
    return reader


def test_payloads_come_back_in_order_and_then_none() -> None:
    stream = io.BytesIO(frame(b"one") + frame(b"") + frame(b"three"))
    assert [read_frame(stream) for _ in range(4)] == [b"one", b"", b"three", None]


async def test_asyncio_reads_the_same_frames() -> None:
    reader = stream_of(frame(b"one") + frame(b""))
    assert [await next_frame(reader) for _ in range(3)] == [b"one", b"", None]


@pytest.mark.parametrize("octets", [b"\0\0", frame(b"payload")[:-1], frame(b"payload")[:4]])
async def test_a_stream_that_breaks_off_inside_a_frame_is_no_clean_end(octets: bytes) -> None:
    with pytest.raises(FrameError, match="ended inside a frame"):
        read_frame(io.BytesIO(octets))
    with pytest.raises(FrameError, match="ended inside a frame"):
        await next_frame(stream_of(octets))


async def test_an_absurd_size_is_not_read() -> None:
    with pytest.raises(FrameError, match="something else wrote to the pipe"):
        read_frame(io.BytesIO(b"Traceback"))
    with pytest.raises(FrameError, match="something else wrote to the pipe"):
        await next_frame(stream_of(b"Traceback"))


def test_a_payload_over_the_limit_is_not_framed() -> None:
    with pytest.raises(FrameError, match="over the"):
        frame(bytes(FRAME_BYTES_MAX + 1))

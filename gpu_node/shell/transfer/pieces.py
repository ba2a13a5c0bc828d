"""Pieces of a blob under the time limit of a stalled stream."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

from gpu_node.shell.link.chunks import BlobPiece
from hypergpu.wire.bulk import StallTimeout


async def limit_stalls(
    pieces: AsyncGenerator[BlobPiece], stall_timeout: StallTimeout, left_bytes: int
) -> AsyncGenerator[BlobPiece]:
    """The same pieces; the stream is closed with this one.

    Args:
        pieces: Pieces of one call.
        stall_timeout: Time limit of the connection's pieces, which is learned from them.
        left_bytes: Bytes still to come.

    Raises:
        TimeoutError: The next piece did not come in time.
    """
    loop = asyncio.get_running_loop()
    async with aclosing(pieces):
        while True:
            asked_s = loop.time()
            async with asyncio.timeout(stall_timeout.limit_s(left_bytes)):
                piece = await anext(pieces, None)
            if piece is None:
                return
            stall_timeout.note_piece(loop.time() - asked_s)
            left_bytes -= piece.payload.nbytes
            yield piece

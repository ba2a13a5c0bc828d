"""Pieces of a stream that are waited for as long as is worth it."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

from gpu_node.shell.link.bulk import Piece
from hypergpu.wire.bulk import StallTimeout


async def patiently(
    pieces: AsyncGenerator[Piece], patience: StallTimeout, left_bytes: int
) -> AsyncGenerator[Piece]:
    """The same pieces; the stream is closed with this one.

    Args:
        pieces: Of one call.
        patience: Of the connection, which learns from them.
        left_bytes: That are to come.

    Raises:
        TimeoutError: The next one did not come in time.
    """
    loop = asyncio.get_running_loop()
    async with aclosing(pieces):
        while True:
            asked_s = loop.time()
            async with asyncio.timeout(patience.limit_s(left_bytes)):
                piece = await anext(pieces, None)
            if piece is None:
                return
            patience.note_piece(loop.time() - asked_s)
            left_bytes -= piece.payload.nbytes
            yield piece

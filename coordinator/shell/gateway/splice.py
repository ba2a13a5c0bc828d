"""A port whose bytes go to a coordinator's bulk port and back as they are: TLS is between the node
and the coordinator, so that nothing is read here.
"""

import asyncio
import contextlib
from collections.abc import Callable

import structlog

from hypergpu.errors import HyperGPUError, Reason

log = structlog.get_logger()

_PIECE_BYTES = 256 << 10
_DIAL_S = 5.0
_LINGER_S = 5.0
CONNECTIONS_MAX = 16_384
"""At a time; one more is closed at once."""


class BulkSplice:
    """The connections of one port."""

    def __init__(self, target: Callable[[], tuple[str, int]]) -> None:
        """``target`` is host and port of the bulk port at the time; it may raise that none is."""
        self._target = target
        self._server: asyncio.Server | None = None
        self._open = 0
        self.port = 0
        """0 before `bind`."""

    async def bind(self, host: str, port: int) -> None:
        """Take a port; gateways of one machine may share it.

        Raises:
            HyperGPUError: ADDRESS_UNUSABLE.
        """
        try:
            self._server = await asyncio.start_server(
                self._serve, host.strip("[]"), port, reuse_port=True, limit=_PIECE_BYTES
            )
        except OSError as error:
            detail = f"{host}:{port} cannot be bound: {error.strerror}"
            raise HyperGPUError(Reason.ADDRESS_UNUSABLE, detail) from error
        self.port = int(self._server.sockets[0].getsockname()[1])

    def close(self) -> None:
        """Take no more connections."""
        if self._server is not None:
            self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._open += 1
        try:
            if self._open <= CONNECTIONS_MAX:
                await self._splice(reader, writer)
        except (OSError, HyperGPUError, TimeoutError) as error:
            log.debug("bulk bytes broke off", reason=str(error))
        finally:
            self._open -= 1
            writer.transport.abort()

    async def _splice(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        host, port = self._target()
        async with asyncio.timeout(_DIAL_S):
            far_reader, far_writer = await asyncio.open_connection(host, port, limit=_PIECE_BYTES)
        # Whatever was taken is in the system's hands once `drain` returns.
        for each in (writer, far_writer):
            each.transport.set_write_buffer_limits(0)
        try:
            async with asyncio.TaskGroup() as both:
                up = both.create_task(_copy(reader, far_writer))
                down = both.create_task(_copy(far_reader, writer))
                # Nobody reads for long what a node says after its coordinator hung up.
                loop = asyncio.get_running_loop()
                down.add_done_callback(lambda _: loop.call_later(_LINGER_S, up.cancel))
        except* OSError:
            pass
        finally:
            far_writer.transport.abort()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Copy bytes until there are no more, and say so."""
    while piece := await reader.read(_PIECE_BYTES):
        writer.write(piece)
        await writer.drain()
    with contextlib.suppress(OSError):
        writer.write_eof()

"""Servers send small writes at once: waiting for an acknowledgement costs a caller 40 ms each."""

import asyncio
import socket

import pytest

from dashboard_api.config import DashboardSettings
from dashboard_api.shell.server import listening_socket
from hypergpu.user.serving.server import ApiPlace, bound_socket


async def has_no_delay(listener: socket.socket) -> bool:
    """Whether a connection that asyncio accepts sends without delay."""
    accepted_transport: asyncio.Future[asyncio.BaseTransport] = asyncio.Future()

    class Accepting(asyncio.Protocol):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            accepted_transport.set_result(transport)

    server = await asyncio.get_running_loop().create_server(Accepting, sock=listener)
    async with server:
        _, writer = await asyncio.open_connection(*listener.getsockname()[:2])
        transport = await accepted_transport
        accepted_socket = transport.get_extra_info("socket")
        try:
            return bool(accepted_socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
        finally:
            transport.close()
            writer.close()
            await writer.wait_closed()


@pytest.mark.asyncio
async def test_answers_of_the_api_leave_token_by_token() -> None:
    assert await has_no_delay(bound_socket(ApiPlace(port=0)))


@pytest.mark.asyncio
async def test_the_page_hears_of_each_event_at_once() -> None:
    assert await has_no_delay(listening_socket(DashboardSettings(port=0)))

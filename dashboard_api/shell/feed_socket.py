"""``/feed``: frames to one client as fast as it takes them, and an end for one that takes none."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

from starlette.websockets import WebSocket, WebSocketDisconnect
from uvicorn.protocols.utils import ClientDisconnected
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol

from dashboard_api.core.frames import hello_frame
from dashboard_api.core.outbox import Resume
from dashboard_api.shell.api import find_session
from dashboard_api.shell.feed import Feed, text_message
from dashboard_api.shell.services import DashboardServices
from hypergpu.user.client import HyperGPUError

CONNECTION = "hypergpu.connection"
NO_SESSION = 4401
REFUSED = 4403
MESSAGE_CHARACTERS_MAX = 1024
FIRST_STATE_WITHIN_S = 2.0


class FeedProtocol(WebSocketsSansIOProtocol):
    """Lets the application write whole messages, and end a connection whose client reads nothing.

    The ordinary way frames each message for each client anew, and a close in it waits for the
    client to read everything that was written before.
    """

    async def run_asgi(self) -> None:
        """Run the application."""
        self.scope["extensions"][CONNECTION] = {"protocol": self}
        await super().run_asgi()

    async def write_message(self, message: bytes, stalled_after_ms: int) -> None:
        """Write a message as soon as the client has taken most of what came before.

        Raises:
            TimeoutError: It took nothing for so long.
            ClientDisconnected: It is gone.
        """
        if not self.writable.is_set():
            async with asyncio.timeout(stalled_after_ms / 1000):
                await self.writable.wait()
        if self.disconnected or self.close_sent or self.transport.is_closing():
            raise ClientDisconnected
        self.transport.write(message)

    def abort(self) -> None:
        """End the connection now."""
        self.transport.abort()


async def serve_feed(services: DashboardServices, socket: WebSocket) -> None:
    """Serve one client until either side ends."""
    if services.recording is not None:
        await socket.accept()
        hello = hello_frame(services.recording.hello())
        messages = _recorded_messages(hello, services.recording.frames())
        await _exchange(socket, messages, services.stalled_after_ms)
        return
    try:
        session = await find_session(services, socket)
        follower = await services.views.follower(session) if session else None
    except HyperGPUError as error:
        await _refuse(socket, REFUSED, error.detail)
        return
    if session is None or follower is None:
        await _refuse(socket, NO_SESSION, "there is no session")
        return
    await socket.accept()
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(FIRST_STATE_WITHIN_S):
            await follower.has_answered.wait()
    messages = _live_messages(follower.feed, session.role.value, resume_wanted(socket))
    await _exchange(socket, messages, services.stalled_after_ms)
    if follower.feed.refusal is not None:
        with contextlib.suppress(RuntimeError, WebSocketDisconnect, ClientDisconnected):
            await socket.close(REFUSED, follower.feed.refusal.detail[:100])


def resume_wanted(socket: WebSocket) -> Resume | None:
    """Where the client says that it was."""
    epoch, seq = (socket.query_params.get(name, "") for name in ("epoch", "seq"))
    if not (epoch and seq.isascii() and seq.isdecimal() and len(seq) < 16):
        return None
    return Resume(epoch, int(seq))


async def _refuse(socket: WebSocket, code: int, reason: str) -> None:
    """Refuse after the handshake: browsers tell a page nothing of a refused one."""
    await socket.accept()
    await socket.close(code, reason[:100])


async def _live_messages(feed: Feed, role: str, resume: Resume | None) -> AsyncIterator[bytes]:
    client = feed.open_client(resume)
    try:
        if feed.refusal is None:
            yield text_message(hello_frame(feed.hello(role)))
        while (message := await client.next_message()) is not None:
            yield message
    finally:
        feed.close_client(client)


async def _recorded_messages(hello: bytes, frames: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    yield text_message(hello)
    async for frame in frames:
        yield text_message(frame)
    # The page stays open at the end of what was recorded.
    await asyncio.Event().wait()


async def _exchange(
    socket: WebSocket, messages: AsyncIterator[bytes], stalled_after_ms: int
) -> None:
    protocol = socket.scope["extensions"][CONNECTION]["protocol"]
    send_task = asyncio.create_task(_send(protocol, messages, stalled_after_ms))
    receive_task = asyncio.create_task(_receive(socket))
    try:
        await asyncio.wait((send_task, receive_task), return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in (send_task, receive_task):
            task.cancel()
        await asyncio.gather(send_task, receive_task, return_exceptions=True)


async def _send(
    protocol: FeedProtocol, messages: AsyncIterator[bytes], stalled_after_ms: int
) -> None:
    async with contextlib.aclosing(messages) as feed:  # type: ignore[type-var]
        async for message in feed:
            try:
                await protocol.write_message(message, stalled_after_ms)
            except TimeoutError:
                protocol.abort()
                return
            except ClientDisconnected:
                return


async def _receive(socket: WebSocket) -> None:
    """Read what the client says, which is nothing that matters, until it goes."""
    with contextlib.suppress(WebSocketDisconnect, ClientDisconnected, RuntimeError):
        while True:
            text = await socket.receive_text()
            if len(text) > MESSAGE_CHARACTERS_MAX:
                await socket.close(1009, "messages are at most 1024 characters")
                return

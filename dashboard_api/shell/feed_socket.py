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
from dashboard_api.shell.feed import Feed
from dashboard_api.shell.services import DashboardServices
from hypergpu.client import HyperGPUError

ABORT = "hypergpu.abort"
NO_SESSION = 4401
REFUSED = 4403
MESSAGE_CHARACTERS_MAX = 1024
FIRST_STATE_WITHIN_S = 2.0


class AbortableProtocol(WebSocketsSansIOProtocol):
    """Gives the application a way to end a connection whose client reads nothing.

    Closing one in the ordinary way waits for the client to read what was written before.
    """

    async def run_asgi(self) -> None:
        """Run the application."""
        self.scope["extensions"][ABORT] = {"abort": self.transport.abort}
        await super().run_asgi()


async def serve_feed(services: DashboardServices, socket: WebSocket) -> None:
    """Serve one client until either side ends."""
    if services.recording is not None:
        await socket.accept()
        hello = hello_frame(services.recording.hello())
        frames = _recorded_frames(hello, services.recording.frames())
        await _exchange(socket, frames, services.stalled_after_ms)
        return
    try:
        session = await find_session(services, socket)
        follower = await services.views.follower(session) if session else None
    except HyperGPUError as refused:
        await _refuse(socket, REFUSED, refused.detail)
        return
    if session is None or follower is None:
        await _refuse(socket, NO_SESSION, "there is no session")
        return
    await socket.accept()
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(follower.has_answered.wait(), FIRST_STATE_WITHIN_S)
    frames = _live_frames(follower.feed, session.role, resume_wanted(socket))
    await _exchange(socket, frames, services.stalled_after_ms)


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


async def _live_frames(feed: Feed, role: str, resume: Resume | None) -> AsyncIterator[bytes]:
    client = feed.open_client(resume)
    try:
        yield hello_frame(feed.hello(role))
        while True:
            yield await client.next_frame()
    finally:
        feed.close_client(client)


async def _recorded_frames(hello: bytes, frames: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    yield hello
    async for frame in frames:
        yield frame
    # The page stays open at the end of what was recorded.
    await asyncio.Event().wait()


async def _exchange(socket: WebSocket, frames: AsyncIterator[bytes], stalled_after_ms: int) -> None:
    sending = asyncio.create_task(_send(socket, frames, stalled_after_ms))
    receiving = asyncio.create_task(_receive(socket))
    try:
        await asyncio.wait((sending, receiving), return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in (sending, receiving):
            task.cancel()
        await asyncio.gather(sending, receiving, return_exceptions=True)


async def _send(socket: WebSocket, frames: AsyncIterator[bytes], stalled_after_ms: int) -> None:
    async with contextlib.aclosing(frames) as feed:  # type: ignore[type-var]
        async for frame in feed:
            try:
                async with asyncio.timeout(stalled_after_ms / 1000):
                    await socket.send_text(frame.decode())
            except TimeoutError:
                socket.scope["extensions"][ABORT]["abort"]()
                return
            except (WebSocketDisconnect, ClientDisconnected, RuntimeError):
                return


async def _receive(socket: WebSocket) -> None:
    """Read what the client says, which is nothing that matters, until it goes."""
    with contextlib.suppress(WebSocketDisconnect, ClientDisconnected, RuntimeError):
        while True:
            text = await socket.receive_text()
            if len(text) > MESSAGE_CHARACTERS_MAX:
                await socket.close(1009, "messages are at most 1024 characters")
                return

"""Changes open links from the program that runs over them: JSON lines over a Unix socket.

The socket has a path, so that a program in any network namespace reaches it.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec

from netsim.emulation.requests import LinkRequestFailed, Request, RequestDone
from netsim.link.error import NetsimError
from netsim.measure.lateness import LatenessVerdict, judge
from netsim.network.backends import LinkOwner

_LINE_BYTES_MAX = 1 << 20
_ANSWER_S = 40.0


class ReadVerdict(msgspec.Struct, frozen=True, tag="verdict"):
    """Answered with a `LatenessVerdict` about the time since the links were opened."""


ControlRequest = Request | ReadVerdict
ControlAnswer = RequestDone | LinkRequestFailed | LatenessVerdict


@asynccontextmanager
async def control_socket(owner: LinkOwner, path: Path) -> AsyncIterator[None]:
    """Take requests at ``path`` while the block runs."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            with contextlib.suppress(ConnectionError, ValueError):
                while line := await reader.readline():
                    writer.write(msgspec.json.encode(await _answer(owner, line)) + b"\n")
                    await writer.drain()
        finally:
            writer.close()

    server = await asyncio.start_unix_server(serve, path, limit=_LINE_BYTES_MAX)
    try:
        yield
    finally:
        server.close()


async def _answer(owner: LinkOwner, line: bytes) -> object:
    try:
        # An impossible link raises its own error while it is decoded.
        request = msgspec.json.decode(line, type=ControlRequest)
        if isinstance(request, ReadVerdict):
            return judge(await owner.lateness())
        return await owner.obey(request)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        return LinkRequestFailed(f"no request: {error}", "see netsim/emulation/requests.py")
    except NetsimError as error:
        return LinkRequestFailed(error.detail, error.fix)


async def ask_links(path: str, request: ControlRequest) -> ControlAnswer:
    """Send a request to the process that keeps the links open, and return its answer.

    Raises:
        NetsimError: The request failed, or nobody answers.
    """
    try:
        reader, writer = await asyncio.open_unix_connection(path, limit=_LINE_BYTES_MAX)
        try:
            writer.write(msgspec.json.encode(request) + b"\n")
            line = await asyncio.wait_for(reader.readline(), _ANSWER_S)
        finally:
            writer.close()
    except (OSError, TimeoutError) as error:
        what = f"the links at {path} do not answer: {error}"
        raise NetsimError(what, "see whether they are still open") from error
    if not line:
        raise NetsimError(f"the links at {path} were closed", "open them again")
    answer: ControlAnswer = msgspec.json.decode(line, type=ControlAnswer)
    if isinstance(answer, LinkRequestFailed):
        raise NetsimError(answer.detail, answer.fix)
    return answer


async def read_verdict(path: str) -> LatenessVerdict:
    """Return whether the links kept their times.

    Raises:
        NetsimError: Nobody answers.
    """
    answer = await ask_links(path, ReadVerdict())
    assert isinstance(answer, LatenessVerdict)  # noqa: S101 - the only answer to this request
    return answer

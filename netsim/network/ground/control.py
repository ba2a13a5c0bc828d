"""Changing open links from the program that runs over them: JSON lines over a Unix socket.

The socket has a path, so that a program in any network namespace reaches it.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec

from netsim.error import NetsimError
from netsim.link.link import Link
from netsim.measure.network import Verdict
from netsim.network.ground.interface import Ground

_LINE_BYTES_MAX = 1 << 20
_ANSWER_S = 40.0


class SetLink(msgspec.Struct, frozen=True, tag="set"):
    """`Ground.set`."""

    name: str
    link: Link


class Cut(msgspec.Struct, frozen=True, tag="cut"):
    """`Ground.cut`."""

    name: str


class Heal(msgspec.Struct, frozen=True, tag="heal"):
    """`Ground.heal`."""

    name: str


class Reset(msgspec.Struct, frozen=True, tag="reset"):
    """`Ground.reset`."""

    name: str


class ReadVerdict(msgspec.Struct, frozen=True, tag="verdict"):
    """`Ground.verdict`."""


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """What became of a request: both empty when it was done."""

    verdict: Verdict | None = None
    refused: str = ""
    fix: str = ""


Request = SetLink | Cut | Heal | Reset | ReadVerdict


@asynccontextmanager
async def control_socket(ground: Ground, path: Path) -> AsyncIterator[None]:
    """Take requests at ``path`` while the block runs."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            with contextlib.suppress(ConnectionError, ValueError):
                while line := await reader.readline():
                    writer.write(msgspec.json.encode(await _answer(ground, line)) + b"\n")
                    await writer.drain()
        finally:
            writer.close()

    server = await asyncio.start_unix_server(serve, path, limit=_LINE_BYTES_MAX)
    try:
        yield
    finally:
        server.close()


async def _answer(ground: Ground, line: bytes) -> Answer:
    try:
        # A link that cannot be refuses itself while it is read.
        return await _done(ground, msgspec.json.decode(line, type=Request))
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        return Answer(refused=f"no request: {error}", fix="see netsim/network/ground/control.py")
    except NetsimError as refused:
        return Answer(refused=refused.detail, fix=refused.fix)


async def _done(ground: Ground, request: Request) -> Answer:
    match request:
        case SetLink(name, link):
            await ground.set(name, link)
        case Cut(name):
            await ground.cut(name)
        case Heal(name):
            await ground.heal(name)
        case Reset(name):
            await ground.reset(name)
        case ReadVerdict():
            return Answer(verdict=await ground.verdict())
    return Answer()


async def asked(path: str, request: Request) -> Answer:
    """Ask whoever holds the links open.

    Raises:
        NetsimError: It was refused, or nobody answers.
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
    answer = msgspec.json.decode(line, type=Answer)
    if answer.refused:
        raise NetsimError(answer.refused, answer.fix)
    return answer

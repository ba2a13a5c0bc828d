"""Requests that change open links, and the child process that answers them, as lines of JSON."""

import asyncio
import sys
from collections.abc import Awaitable, Callable, Sequence
from enum import StrEnum
from typing import Any

import msgspec

from netsim.link import NetsimError, Shape


class Condition(StrEnum):
    """What a node's link does to everything that crosses it."""

    OPEN = "open"
    CUT = "cut"
    """Everything is lost and nobody is told. Streams come back as TCP's timers have it."""
    STALLED = "stalled"
    """Nothing moves and nothing is lost: what waits goes on when the link is open again."""
    HALF_OPEN = "half_open"
    """Connections are accepted and never answered; existing ones go silent for good."""
    DISCONNECTED = "disconnected"
    """Connections are reset and new ones rejected."""


class SetShape(msgspec.Struct, frozen=True, tag="set"):
    """From now on a node's link is this one. Its variation and traces count from now."""

    name: str
    shape: Shape


def require_no_nat(name: str, shape: Shape, what: str) -> None:
    """Reject a host behind a NAT where none is emulated.

    Raises:
        NetsimError: A NAT stands before the host.
    """
    if shape.nat is not None:
        detail = f"{name} stands behind a NAT ({shape.nat}), which {what} does not emulate"
        raise NetsimError(detail, "use the tunnel, or leave nat out")


class SetCondition(msgspec.Struct, frozen=True, tag="condition"):
    """From now on a node's link does this."""

    name: str
    condition: Condition


class Reset(msgspec.Struct, frozen=True, tag="reset"):
    """Break off every connection of a node; both ends are told at once."""

    name: str


class ReadStatistics(msgspec.Struct, frozen=True, tag="statistics"):
    """Answered with the backend's statistics since it was opened."""


LinkRequest = SetShape | SetCondition | Reset | ReadStatistics


class PacketCount(msgspec.Struct, kw_only=True):
    """Packets of one direction of one node."""

    offered: int = 0
    lost: int = 0
    overflowed: int = 0
    """Dropped since the queue was full."""
    duplicated: int = 0
    overtaking: int = 0
    delivered: int = 0
    delivered_bytes: int = 0


class RequestDone(msgspec.Struct, frozen=True, tag="done"):
    """The request was carried out."""

    at_ns: int = 0
    """When, by this machine's monotonic clock."""


class LinkRequestFailed(msgspec.Struct, frozen=True, tag="failed"):
    """The request cannot be carried out."""

    detail: str
    fix: str


def decode_line(line: bytes, kind: Any) -> Any:
    """Decode a line of JSON that another process wrote.

    Raises:
        NetsimError: It is not of this kind, or no link can be as it says.
    """
    try:
        return msgspec.json.decode(line, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        fix = "see the structs in netsim/emulation/requests.py and netsim/proxy/process.py"
        raise NetsimError(f"netsim does not understand this line: {error}", fix) from error


async def answer_line(line: bytes, kind: Any, obey: Callable[[Any], Awaitable[object]]) -> object:
    """Carry out the request of a line and return its answer, a failure in words included."""
    try:
        return await obey(decode_line(line, kind))
    except NetsimError as error:
        return LinkRequestFailed(error.detail, error.fix)


START_S = 60.0
ANSWER_S = 30.0
_END_S = 30.0
# A line of statistics of some hundred nodes is longer than asyncio's usual 64 KiB.
_LINE_BYTES_MAX = 16 << 20


class AnsweringChild:
    """One child process, which gets one request at a time.

    Args:
        module: The module that it runs with ``python -m``.
        name: Its name in messages, as in "the tunnel's router".
        answers: The type of all its answers.
        answer_s: How long an answer may take.
    """

    def __init__(self, module: str, name: str, *, answers: Any, answer_s: float = ANSWER_S) -> None:
        self._module = module
        self._name = name
        self._answers = answers
        self._answer_s = answer_s
        self._process: asyncio.subprocess.Process | None = None
        self._asking = asyncio.Lock()
        self._is_broken = False

    @property
    def process_id(self) -> int | None:
        """Process id of the child; None while it does not run."""
        return None if self._process is None else self._process.pid

    async def start(self, *arguments: str, descriptors: Sequence[int] = ()) -> None:
        """Start it; ``descriptors`` are files that it inherits."""
        self._process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", "-m", self._module, *arguments),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            pass_fds=descriptors,
            # Ctrl-C is for the owner, who ends the child in order.
            start_new_session=True,
            limit=_LINE_BYTES_MAX,
        )

    async def ask(self, request: msgspec.Struct, *, timeout_s: float | None = None) -> Any:
        """Ask and wait for the answer.

        Raises:
            NetsimError: The child refuses, is gone, or leaves this or an earlier request without
                an answer.
        """
        # A cancelled caller must not leave its answer to the next one.
        return await asyncio.shield(self._exchange(request, timeout_s or self._answer_s))

    async def end(self) -> None:
        """Close its input, at which it ends by itself; kill it when it does not. Safe twice."""
        process, self._process = self._process, None
        if process is None:
            return
        if process.stdin is not None:
            process.stdin.close()
        try:
            async with asyncio.timeout(_END_S):
                await process.wait()
        except TimeoutError:
            process.kill()
            await process.wait()

    async def _exchange(self, request: msgspec.Struct, timeout_s: float) -> Any:
        process = self._process
        if process is None:
            raise NetsimError(f"{self._name} is not open", "use it inside `async with`")
        line = b""
        async with self._asking:
            # A late answer would be taken for that to the next request, so there is no next one.
            if not self._is_broken and process.stdin and process.stdout:
                try:
                    process.stdin.write(msgspec.json.encode(request) + b"\n")
                    async with asyncio.timeout(timeout_s):
                        line = await process.stdout.readline()
                except TimeoutError:
                    self._is_broken = True
                except ConnectionError:
                    line = b""
        if self._is_broken:
            what = f"{self._name} has left a request without an answer for too long"
            raise NetsimError(what, "open it anew, on a machine with less to do")
        if not line:
            raise NetsimError(f"{self._name} is gone", "read its messages on standard error")
        answer = msgspec.json.decode(line, type=self._answers)
        if isinstance(answer, LinkRequestFailed):
            raise NetsimError(answer.detail, answer.fix)
        return answer

"""Runs programs over open links: starts them, lets them change the links, ends with the signals.

The control socket has a path, so that a program in any network namespace reaches it.
"""

import asyncio
import contextlib
import fcntl
import os
import shutil
import signal
import tempfile
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import msgspec

from hypergpu.leash import leash_command
from hypergpu.sites import SITES_VARIABLE, Sites
from netsim.emulation.requests import LinkRequest, LinkRequestFailed, RequestDone, answer_line
from netsim.link import NetsimError
from netsim.measure.lateness import LatenessVerdict, judge
from netsim.network.backends import LinkOwner, OpenLinks

_Result = TypeVar("_Result")
_NUMBERS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_is_completing: ContextVar[bool] = ContextVar("is_completing", default=False)


def run_to_end(work: Coroutine[Any, Any, _Result]) -> _Result:
    """Run a coroutine to its end; the first signal cancels it, and later ones are ignored.

    Raises:
        SystemExit: A signal cancelled it; the status is 128 and its number, as in shells.
    """
    return asyncio.run(_complete(work))


async def _complete(work: Coroutine[Any, Any, _Result]) -> _Result:
    _is_completing.set(True)
    task = asyncio.ensure_future(work)
    received_signals: list[int] = []

    def cancel(number: int) -> None:
        if not received_signals:
            received_signals.append(number)
            task.cancel()

    with receiving_signals(cancel):
        try:
            return await task
        except asyncio.CancelledError:
            if received_signals:
                raise SystemExit(128 + received_signals[0]) from None
            raise


@contextmanager
def receiving_signals(receiver: Callable[[int], None]) -> Iterator[None]:
    """Pass signals to a receiver for the block."""
    loop = asyncio.get_running_loop()
    for number in _NUMBERS:
        loop.add_signal_handler(number, receiver, number)
    try:
        yield
    finally:
        for number in _NUMBERS:
            if _is_completing.get():
                # The code after the block removes what was opened, which nothing may interrupt.
                loop.add_signal_handler(number, _ignore)
            else:
                loop.remove_signal_handler(number)


def _ignore() -> None:
    """Do nothing: the program is ending already."""


def is_from_terminal(number: int) -> bool:
    """Whether a signal may be Ctrl-C, which every program in a terminal's foreground gets."""
    return number == signal.SIGINT and any(_is_foreground(each) for each in range(3))


def _is_foreground(descriptor: int) -> bool:
    try:
        return os.tcgetpgrp(descriptor) == os.getpgrp()
    except OSError:
        return False


_LINE_BYTES_MAX = 1 << 20
_ANSWER_S = 40.0


class ReadVerdict(msgspec.Struct, frozen=True, tag="verdict"):
    """Answered with a `LatenessVerdict` about the time since the links were opened."""


ControlRequest = LinkRequest | ReadVerdict
ControlAnswer = RequestDone | LinkRequestFailed | LatenessVerdict


@asynccontextmanager
async def control_socket(owner: LinkOwner, path: Path) -> AsyncIterator[None]:
    """Take requests at ``path`` while the block runs."""

    async def obey(request: ControlRequest) -> object:
        if isinstance(request, ReadVerdict):
            return judge(await owner.lateness())
        return await owner.obey(request)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            with contextlib.suppress(ConnectionError, ValueError):
                while line := await reader.readline():
                    writer.write(
                        msgspec.json.encode(await answer_line(line, ControlRequest, obey)) + b"\n"
                    )
                    await writer.drain()
        finally:
            writer.close()

    server = await asyncio.start_unix_server(serve, path, limit=_LINE_BYTES_MAX)
    try:
        yield
    finally:
        server.close()


async def ask_links(path: str, request: ControlRequest) -> ControlAnswer:
    """Send a request to the process that keeps the links open, and return its answer.

    Raises:
        NetsimError: The request failed, or nobody answers.
    """
    try:
        reader, writer = await asyncio.open_unix_connection(path, limit=_LINE_BYTES_MAX)
        try:
            writer.write(msgspec.json.encode(request) + b"\n")
            async with asyncio.timeout(_ANSWER_S):
                line = await reader.readline()
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


_PREFIX = "netsim-links-"


class ProgramEnd(NamedTuple):
    """How a program over links ended."""

    status: int
    """Its exit status; 128 and the signal's number when it died of one."""
    verdict: LatenessVerdict


@asynccontextmanager
async def controllable(links: OpenLinks) -> AsyncIterator[Sites]:
    """Open a control socket for the block; yields the sites, which name it."""
    with _socket_folder() as folder:
        path = folder / "control"
        async with control_socket(links.owner, path):
            yield msgspec.structs.replace(links.sites, control=str(path))


async def run_program(links: OpenLinks, command: Sequence[str]) -> ProgramEnd:
    """Run a program at the coordinator's end and wait for it.

    Signals that ask this process to end are passed on, and the program decides when it ends.
    """
    async with controllable(links) as sites:
        child = await asyncio.create_subprocess_exec(
            *leash_command(sites.coordinator.command(command)),
            env={**os.environ, SITES_VARIABLE: sites_json(sites)},
        )
        received_signals: list[int] = []

        def pass_on(number: int) -> None:
            received_signals.append(number)
            if received_signals.count(number) == 1 and is_from_terminal(number):
                # The terminal has sent it to the program too. A second one was sent to us alone.
                return
            with contextlib.suppress(ProcessLookupError):
                child.send_signal(number)

        try:
            with receiving_signals(pass_on):
                status = await child.wait()
        finally:
            if child.returncode is None:
                child.kill()
                await child.wait()
        verdict = judge(await links.owner.lateness())
        return ProgramEnd(128 - status if status < 0 else status, verdict)


async def keep_open(links: OpenLinks, announce: Callable[[Sites], None]) -> LatenessVerdict:
    """Keep links open until a signal asks this process to end.

    Args:
        links: The links.
        announce: Called with the sites, which name the control socket.
    """
    end_event = asyncio.Event()
    async with controllable(links) as sites:
        with receiving_signals(lambda _: end_event.set()):
            announce(sites)
            await end_event.wait()
        return judge(await links.owner.lateness())


def sites_json(sites: Sites) -> str:
    """Encode sites for `SITES_VARIABLE`."""
    return msgspec.json.encode(sites).decode()


@contextmanager
def _socket_folder() -> Iterator[Path]:
    """Make a folder for the block, and remove those of runs that were killed before.

    The owner holds a lock on its folder, which the kernel drops however the owner ends.
    """
    for leftover in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        descriptor = _lock(leftover)
        if descriptor is not None:
            shutil.rmtree(leftover, ignore_errors=True)
            os.close(descriptor)
    while True:
        folder = Path(tempfile.mkdtemp(prefix=_PREFIX))
        descriptor = _lock(folder)
        if descriptor is not None:
            break
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(descriptor)


def _lock(folder: Path) -> int | None:
    """Lock a folder of ours; None when it has an owner, is somebody else's, or is gone."""
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return None
    with contextlib.suppress(OSError):
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        open_stat, present = os.fstat(descriptor), folder.lstat()
        if open_stat.st_uid == os.geteuid() and open_stat.st_ino == present.st_ino:
            return descriptor
    os.close(descriptor)
    return None

"""Runs a program over open links: starts it at the coordinator's end, and tells it all ends."""

import asyncio
import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import NamedTuple

import msgspec

from hypergpu.cluster.leash import leash_command
from hypergpu.sites import SITES_VARIABLE, Sites
from netsim.measure.lateness import LatenessVerdict, judge
from netsim.network.backends import OpenLinks
from netsim.network.control import control_socket
from netsim.network.signals import is_from_terminal, receiving_signals

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
        received: list[int] = []

        def pass_on(number: int) -> None:
            received.append(number)
            if received.count(number) == 1 and is_from_terminal(number):
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
    ended = asyncio.Event()
    async with controllable(links) as sites:
        with receiving_signals(lambda _: ended.set()):
            announce(sites)
            await ended.wait()
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
        opened, present = os.fstat(descriptor), folder.lstat()
        if opened.st_uid == os.geteuid() and opened.st_ino == present.st_ino:
            return descriptor
    os.close(descriptor)
    return None

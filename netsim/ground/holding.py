"""A program over open links: started at the coordinator's site, told of all sites, waited for."""

import asyncio
import contextlib
import os
import signal
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import NamedTuple

import msgspec

from hypergpu.cli.cluster.leash import leashed
from hypergpu.sites import SITES_VARIABLE, Sites
from netsim.ground.backend import Backend
from netsim.ground.control import control_socket
from netsim.ground.interface import Ground, Links
from netsim.ground.proxied import proxy_ground
from netsim.ground.queued import queue_ground
from netsim.ground.tunnelled import tunnel_ground
from netsim.measure.network import Verdict

_PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Held(NamedTuple):
    """How a program over links ended."""

    status: int
    """Its exit status; 128 and the signal's number when it died of one."""
    verdict: Verdict


def opened(backend: Backend, links: Links) -> AbstractAsyncContextManager[Ground]:
    """Open links; leaving the context removes everything that was made for them.

    Raises:
        RefusedError: The backend cannot do what is asked, or cannot run here; nothing is left.
    """
    match backend:
        case Backend.PROXY:
            return proxy_ground(links)
        case Backend.TUNNEL:
            return tunnel_ground(links)
        case Backend.TC:
            return queue_ground(links)


@asynccontextmanager
async def told(ground: Ground) -> AsyncIterator[Sites]:
    """The sites with a control socket, which is there while the block runs."""
    with tempfile.TemporaryDirectory(prefix="netsim-") as folder:
        path = Path(folder) / "control"
        async with control_socket(ground, path):
            yield msgspec.structs.replace(ground.sites, control=str(path))


async def held(ground: Ground, command: Sequence[str]) -> Held:
    """Run a program at the coordinator's site and wait for its end.

    Signals that ask this process to end are passed on, and the program decides when it ends.
    """
    async with told(ground) as sites:
        environment = {**os.environ, SITES_VARIABLE: msgspec.json.encode(sites).decode()}
        child = await asyncio.create_subprocess_exec(
            *leashed(sites.coordinator.command(command)),
            env=environment,
        )
        loop = asyncio.get_running_loop()
        for number in _PASSED_ON:
            loop.add_signal_handler(number, _pass_on, child, number)
        try:
            status = await child.wait()
        finally:
            for number in _PASSED_ON:
                loop.remove_signal_handler(number)
            if child.returncode is None:
                child.kill()
                await child.wait()
        return Held(128 - status if status < 0 else status, await ground.verdict())


def _pass_on(child: asyncio.subprocess.Process, number: int) -> None:
    if number == signal.SIGINT and os.isatty(0):
        return  # The terminal has sent Ctrl-C to both of us.
    with contextlib.suppress(ProcessLookupError):
        child.send_signal(number)

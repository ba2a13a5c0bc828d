"""A program over open links: started at the coordinator's site, told of all sites, waited for."""

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import NamedTuple

import msgspec

from hypergpu.cluster.leash import leashed
from hypergpu.sites import SITES_VARIABLE, Sites
from netsim.measure.network import Verdict
from netsim.network.ground.backend import Backend
from netsim.network.ground.control import control_socket
from netsim.network.ground.interface import Ground, Links
from netsim.network.ground.meeting import meeting_folder
from netsim.network.ground.proxied import proxy_ground
from netsim.network.ground.signals import is_terminals, received
from netsim.network.ground.tunnelled import tunnel_ground


class Held(NamedTuple):
    """How a program over links ended."""

    status: int
    """Its exit status; 128 and the signal's number when it died of one."""
    verdict: Verdict


def opened(backend: Backend, links: Links) -> AbstractAsyncContextManager[Ground]:
    """Open links; leaving the context removes everything that was made for them.

    Raises:
        NetsimError: The backend cannot do what is asked, or cannot run here; nothing is left.
    """
    match backend:
        case Backend.PROXY:
            return proxy_ground(links)
        case Backend.TUNNEL:
            return tunnel_ground(links)
        case Backend.TC:
            from netsim.network.ground.queued import queue_ground

            return queue_ground(links)


@asynccontextmanager
async def told(ground: Ground) -> AsyncIterator[Sites]:
    """The sites with a control socket, which is there while the block runs."""
    with meeting_folder() as folder:
        path = folder / "control"
        async with control_socket(ground, path):
            yield msgspec.structs.replace(ground.sites, control=str(path))


async def held(ground: Ground, command: Sequence[str]) -> Held:
    """Run a program at the coordinator's site and wait for its end.

    Signals that ask this process to end are passed on, and the program decides when it ends.
    """
    async with told(ground) as sites:
        environment = {**os.environ, SITES_VARIABLE: sites_text(sites)}
        child = await asyncio.create_subprocess_exec(
            *leashed(sites.coordinator.command(command)),
            env=environment,
        )

        came: list[int] = []

        def pass_on(number: int) -> None:
            came.append(number)
            if came.count(number) == 1 and is_terminals(number):
                # It has it already, unless somebody sent this to us alone: they send another.
                return
            with contextlib.suppress(ProcessLookupError):
                child.send_signal(number)

        try:
            with received(pass_on):
                status = await child.wait()
        finally:
            if child.returncode is None:
                child.kill()
                await child.wait()
        return Held(128 - status if status < 0 else status, await ground.verdict())


async def kept(ground: Ground, say: Callable[[Sites], None]) -> Verdict:
    """Keep links open until a signal asks this process to end.

    Args:
        ground: The links.
        say: Is told the sites, with the control socket.
    """
    asked = asyncio.Event()
    async with told(ground) as sites:
        with received(lambda _: asked.set()):
            say(sites)
            await asked.wait()
        return await ground.verdict()


def sites_text(sites: Sites) -> str:
    """What `SITES_VARIABLE` holds."""
    return msgspec.json.encode(sites).decode()

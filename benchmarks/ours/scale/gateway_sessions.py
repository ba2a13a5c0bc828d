"""Many sessions of the real daemon in one process, which dial gateways, lose them and come back.

Spawned by `benchmarks.ours.scale.gateways`: a line on stdout when all are connected; then an answer
for each line on stdin: round trips of so many seconds, or how its links are.
"""

import asyncio
import gc
import logging
import os
import sys
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import msgspec
import structlog

from benchmarks.ours.sessions import SESSION, RoundTrips, SessionSpread, daemons, first_end
from gpu_node.shell.link.control import ROUND_TRIP
from hypergpu.process import raise_descriptor_limit


class LinkCount(msgspec.Struct):
    """Links of a process."""

    connected: int = 0
    """How many are there now."""
    lost: int = 0
    """How many were there and broke, since its start."""
    connected_s: float = 0.0
    """When the newest was connected, by the clock that all processes of a machine share."""


class LinkedTrips(RoundTrips):
    """Round trips of heartbeats, and links that break and are there again."""

    def __init__(self, sessions: int) -> None:
        super().__init__(sessions)
        self.links = LinkCount()
        self._connected: set[int] = set()

    def hear_logs(self) -> None:
        """Take both from the daemons' log lines and drop every other line."""

        def take(_logger: object, _method: str, line: Any) -> Any:
            match line["event"]:
                case event if event == ROUND_TRIP:
                    self.note(SESSION.get(), line["taken_us"])
                case "Connected":
                    self._connected.add(SESSION.get())
                    self.links.connected_s = time.monotonic()
                case "LinkLost" | "LinkRejected":
                    # A dial that nobody took loses nothing.
                    self.links.lost += SESSION.get() in self._connected
                    self._connected.discard(SESSION.get())
                case _:
                    pass
            self.links.connected = len(self._connected)
            raise structlog.DropEvent

        debug = structlog.make_filtering_bound_logger(logging.DEBUG)
        structlog.configure(processors=[take], wrapper_class=debug)


async def serve_sessions(owner: ExitStack) -> None:
    """Open the sessions, say so, and answer."""
    loop = asyncio.get_running_loop()

    async def next_line() -> str:
        return await loop.run_in_executor(None, sys.stdin.readline)

    spread = msgspec.json.decode(await next_line(), type=SessionSpread)
    trips = LinkedTrips(spread.sessions)
    tasks = await daemons(spread, trips, owner)
    heard_task, end_task = (
        asyncio.create_task(trips.all_heard.wait()),
        asyncio.create_task(first_end(tasks)),
    )
    await asyncio.wait([heard_task, end_task], return_when=asyncio.FIRST_COMPLETED)
    _say(not end_task.done())
    while line := await next_line():
        if line.strip() == "links":
            _say(trips.links)
        else:
            trips.taken_us.clear()
            await asyncio.sleep(float(line))
            _say(trips.taken_us)


def _say(value: object) -> None:
    sys.stdout.write(msgspec.json.encode(value).decode() + "\n")
    sys.stdout.flush()


def _yield_to_others() -> None:
    """Let gateways and the coordinator go first: these daemons stand for as many machines.

    Linux shares a machine among sessions of processes, so the niceness of a process says little.
    """
    with suppress(OSError):
        Path("/proc/self/autogroup").write_text("10", "ascii")
    os.nice(10)


if __name__ == "__main__":
    raise_descriptor_limit()
    _yield_to_others()
    # A daemon has a process of its own, which never looks through thousands of others' objects.
    gc.disable()
    with ExitStack() as stack:
        asyncio.run(serve_sessions(stack))

"""Many sessions in one process: the real daemon's, or bare streams that say as much and as often.

Spawned by `benchmarks.fanout`: a line on stdout when all are connected, another with the round
trips of the seconds after a line came on stdin.
"""

import argparse
import asyncio
import logging
import sys
from contextlib import ExitStack
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import grpc
import msgspec
import structlog

from gpu_node.config import NodeSettings
from gpu_node.shell.daemon.app import Daemon
from gpu_node.shell.folder.state import StatePaths
from gpu_node.shell.link.channel import OPTIONS
from gpu_node.shell.link.control import ROUND_TRIP
from gpu_node.shell.worker.protocol import WorkerCapabilities
from hypergpu.units import Bytes
from hypergpu.v1 import node_pb2
from hypergpu.wire.credentials import parse_token

BARE = "/bare/echo"
INTERVAL_S = 5.0
_STEP_MS = 500
"""An inner step of those that train: rounds in quick succession would be measured with them."""
CAPABLE = WorkerCapabilities(
    device="cpu",
    device_name="none",
    memory_bytes=Bytes(0),
    kind="null",
    workloads={"null": 1},
)


SESSION: ContextVar[int] = ContextVar("SESSION", default=-1)
"""Number of the session that a log line of this process is of."""


class SessionSpread(msgspec.Struct, frozen=True):
    """What a process is told on its standard input, first line."""

    sessions: int
    start_over_s: float
    """Sessions dial evenly over this time, so that their heartbeats do not come in one burst."""
    folder: str
    address: str
    """For bare streams."""
    token: str
    """For daemons; empty for bare streams."""


class RoundTrips:
    """Microseconds from a heartbeat to its echo, of every session of this process."""

    def __init__(self, sessions: int) -> None:
        self.taken_us: list[int] = []
        self.all_heard = asyncio.Event()
        self._sessions = sessions
        self._heard: set[int] = set()

    def note(self, session: int, taken_us: int) -> None:
        """An echo arrived: the first of a stream may be too late to be timed."""
        self.taken_us.append(taken_us)
        self._heard.add(session)
        if len(self._heard) == self._sessions:
            self.all_heard.set()

    def hear_logs(self) -> None:
        """Take them from the daemons' debug lines and drop every other line."""

        def take(_logger: object, _method: str, line: Any) -> Any:
            if line["event"] == ROUND_TRIP:
                self.note(SESSION.get(), line["taken_us"])
            raise structlog.DropEvent

        debug = structlog.make_filtering_bound_logger(logging.DEBUG)
        structlog.configure(processors=[take], wrapper_class=debug)


async def daemons(
    spread: SessionSpread, trips: RoundTrips, owner: ExitStack
) -> list[asyncio.Task[Any]]:
    """Join and run daemons, each with a state folder and a TCP connection of its own."""
    trips.hear_logs()
    token = parse_token(spread.token)
    tasks: list[asyncio.Task[Any]] = []
    for number in range(spread.sessions):
        folder = Path(spread.folder) / f"node-{number}"
        paths = owner.enter_context(StatePaths(folder))
        daemon = Daemon(
            NodeSettings(
                state_dir=folder, worker="null", sandbox="off", worker_step_floor_ms=_STEP_MS
            ),
            paths,
            token=token,
        )
        SESSION.set(number)
        tasks.append(asyncio.create_task(daemon.run(CAPABLE)))
        await asyncio.sleep(spread.start_over_s / spread.sessions)
    return tasks


async def streams(spread: SessionSpread, trips: RoundTrips) -> list[asyncio.Task[Any]]:
    """Open streams on which a message of a heartbeat's size goes out and comes back."""
    tasks: list[asyncio.Task[Any]] = []
    for number in range(spread.sessions):
        tasks.append(asyncio.create_task(_stream(spread.address, trips, number)))
        await asyncio.sleep(spread.start_over_s / spread.sessions)
    return tasks


async def _stream(address: str, trips: RoundTrips, number: int) -> None:
    loop = asyncio.get_running_loop()
    async with grpc.aio.insecure_channel(address, options=OPTIONS) as channel:
        call: Any = channel.stream_stream(BARE)()
        sequence = 0
        while True:
            sequence += 1
            sent_at_s = loop.time()
            beat = node_pb2.Heartbeat(sequence=sequence)
            await call.write(node_pb2.ControlRequest(heartbeat=beat).SerializeToString())
            await call.read()
            trips.note(number, round((loop.time() - sent_at_s) * 1e6))
            await asyncio.sleep(INTERVAL_S)


async def serve_sessions(owner: ExitStack) -> None:
    """Open the sessions, say so, wait for the word, measure, report."""
    loop = asyncio.get_running_loop()
    spread = msgspec.json.decode(
        await loop.run_in_executor(None, sys.stdin.readline), type=SessionSpread
    )
    trips = RoundTrips(spread.sessions)
    if spread.token:
        tasks = await daemons(spread, trips, owner)
    else:
        tasks = await streams(spread, trips)
    end_task = asyncio.create_task(first_end(tasks))
    await asyncio.wait(
        [end_task, asyncio.create_task(trips.all_heard.wait())],
        return_when=asyncio.FIRST_COMPLETED,
    )
    _say(trips.all_heard.is_set() and not end_task.done())
    seconds = float(await loop.run_in_executor(None, sys.stdin.readline))
    trips.taken_us.clear()
    await asyncio.sleep(seconds)
    _say(trips.taken_us)


async def first_end(tasks: list[asyncio.Task[Any]]) -> None:
    """Wait until a session ends."""
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)


def _say(value: object) -> None:
    sys.stdout.write(msgspec.json.encode(value).decode() + "\n")
    sys.stdout.flush()


async def echo() -> None:
    """The other side of bare streams: a port on stdout, then echoes for ever."""

    async def answer(_first: object, context: Any) -> None:
        while (message := await context.read()) is not grpc.aio.EOF:
            await context.write(message)

    handler: Any = grpc.stream_stream_rpc_method_handler(answer)
    _, service, method = BARE.split("/")
    server = grpc.aio.server()
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler(service, {method: handler}),)
    )
    _say(server.add_insecure_port("127.0.0.1:0"))
    await server.start()
    await server.wait_for_termination()


def main() -> None:
    """Be a process of sessions, or the bare server."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--echo", action="store_true")
    if parser.parse_args().echo:
        asyncio.run(echo())
        return
    with ExitStack() as owner:
        asyncio.run(serve_sessions(owner))


if __name__ == "__main__":
    main()

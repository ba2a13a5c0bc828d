"""A node with a coordinator of its own over a link of the tunnel, and what it moves there."""

import asyncio
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import msgspec

from benchmarks.ours.cluster import BenchmarkError
from benchmarks.ours.connections.node_end import TransferOrder, TransferTime
from netsim.namespaces.host import COORDINATOR
from netsim.tunnel.tunnel import Tunnel


class TransferLane:
    """Moves one thing at a time."""

    def __init__(self, node: "_End") -> None:
        self._node = node

    async def move(self, order: TransferOrder) -> TransferTime:
        """Give an order and wait until it is done."""
        self._node.tell(msgspec.json.encode(order).decode())
        return msgspec.json.decode(await self._node.next_line(), type=TransferTime)


@asynccontextmanager
async def open_lane(tunnel: Tunnel, name: str, folder: Path) -> AsyncIterator[TransferLane]:
    """Start both ends; they end with the block.

    Args:
        tunnel: Open; its link to the node is as good as can be until the node has joined.
        name: The node's host in the tunnel.
        folder: Gets state and logs.
    """
    await asyncio.to_thread(folder.mkdir)
    async with AsyncExitStack() as owner:
        inside = tunnel.host(COORDINATOR).command(_program("coordinator_end", str(folder)))
        inside.append(tunnel.address(COORDINATOR))
        there = await owner.enter_async_context(_start_end(inside, folder / "there.log"))
        token = await there.next_line()
        outside = tunnel.host(name).command(_program("node_end", str(folder / "node")))
        node = await owner.enter_async_context(_start_end(outside, folder / "node.log"))
        node.tell(token)
        yield TransferLane(node)


def _program(name: str, *arguments: str) -> list[str]:
    return [sys.executable, "-m", f"benchmarks.ours.connections.{name}", *arguments]


class _End:
    """A program that is told lines and says lines."""

    def __init__(self, child: Process, log: Path) -> None:
        self._child = child
        self._log = log

    def tell(self, line: str) -> None:
        """Write to its standard input."""
        assert self._child.stdin is not None  # noqa: S101 - it was started with pipes
        self._child.stdin.write(f"{line}\n".encode())

    async def next_line(self) -> str:
        """Its next line."""
        assert self._child.stdout is not None  # noqa: S101 - as above
        line = (await self._child.stdout.readline()).decode().strip()
        if not line:
            raise BenchmarkError(f"a program ended early: {self._log.read_text()[-1000:]}")
        return line


@asynccontextmanager
async def _start_end(command: Sequence[str], log: Path) -> AsyncIterator[_End]:
    with log.open("wb") as errors:
        child = await asyncio.create_subprocess_exec(
            *command, stdin=PIPE, stdout=PIPE, stderr=errors
        )
    try:
        yield _End(child, log)
    finally:
        assert child.stdin is not None  # noqa: S101 - as above
        child.stdin.close()
        await child.wait()

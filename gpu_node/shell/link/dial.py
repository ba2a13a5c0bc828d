"""Dialling over a line that may be dead: more than one connection is tried, the first one is taken.

A connection that was begun while the line was dead may stay dead when the line is well: a router
between has forgotten it, or TCP tries again ever more seldom. Nothing is said over any of them
before one is chosen, so the coordinator is greeted once.
"""

import asyncio
from collections.abc import Callable

from gpu_node.shell.link.calls import Calls

AGAIN_MIN_S = 1.0
AGAIN_TRIPS = 6
"""Round trips until another connection is tried beside those that have not come about: TCP and TLS
take three or four."""


async def first_settled(opened: Callable[[], Calls], *, again_s: float, timeout_s: float) -> Calls:
    """Calls over the first channel that has come about, or that knows that it cannot.

    Args:
        opened: Opens a channel.
        again_s: Until another one is tried beside those before it.
        timeout_s: Until all are given up.

    Raises:
        TimeoutError: None has come about.
        HyperGPUError: As ``opened``.
    """
    waiting: dict[asyncio.Task[None], Calls] = {}
    try:
        async with asyncio.timeout(timeout_s):
            while True:
                calls = opened()
                waiting[asyncio.create_task(calls.settled(), name="dial")] = calls
                settled, _ = await asyncio.wait(
                    waiting, timeout=again_s, return_when=asyncio.FIRST_COMPLETED
                )
                if settled:
                    return waiting.pop(settled.pop())
    finally:
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        for calls in waiting.values():
            await calls.close()

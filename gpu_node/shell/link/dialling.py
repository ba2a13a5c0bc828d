"""Dialling over a line that may be dead: several connections are tried, the first one is taken.

A connection that was begun while the line was dead may stay dead when the line is well: a router
between has forgotten it, or TCP tries again ever more seldom. Nothing is sent over any of them
before one is chosen, so the coordinator is greeted once.
"""

import asyncio
from collections.abc import Callable

from gpu_node.shell.link.calls import Calls

AGAIN_MIN_S = 1.0
AGAIN_TRIPS = 6
"""Round trips until another connection is tried beside the pending ones: TCP and TLS take three or
four.
"""


async def dial_first(
    open_calls: Callable[[], Calls], *, again_s: float, timeout_s: float, targets: int = 1
) -> Calls:
    """Calls over the first channel that is connected, or the last that knows that it cannot be.

    Args:
        open_calls: Opens a channel, each time to the next target.
        targets: Coordinators, of which one is to be found.
        again_s: Time until another channel is tried beside those before it. Once each target was
            tried it is doubled each time: one that is busy must not get ever more connections.
        timeout_s: Time until all are given up.

    Raises:
        TimeoutError: None was connected.
        HyperGPUError: As ``open_calls``.
    """
    pending: dict[asyncio.Task[None], Calls] = {}
    untried = targets
    try:
        async with asyncio.timeout(timeout_s):
            while True:
                untried, again_s = untried - 1, again_s if untried > 0 else 2 * again_s
                calls = open_calls()
                pending[asyncio.create_task(calls.connect(), name="dial")] = calls
                settled, _ = await asyncio.wait(
                    pending, timeout=again_s, return_when=asyncio.FIRST_COMPLETED
                )
                for task in settled:
                    found = pending.pop(task)
                    targets -= 1
                    if found.is_connected or targets <= 0:
                        return found
                    await found.close()
    finally:
        for task in pending:
            task.cancel()
        await asyncio.gather(*pending, return_exceptions=True)
        for calls in pending.values():
            await calls.close()

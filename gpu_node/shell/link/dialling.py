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
    pending_dials: dict[asyncio.Task[None], Calls] = {}
    untried_targets = targets
    try:
        async with asyncio.timeout(timeout_s):
            while True:
                untried_targets, again_s = (
                    untried_targets - 1,
                    again_s if untried_targets > 0 else 2 * again_s,
                )
                calls = open_calls()
                pending_dials[asyncio.create_task(calls.connect(), name="dial")] = calls
                settled_tasks, _ = await asyncio.wait(
                    pending_dials, timeout=again_s, return_when=asyncio.FIRST_COMPLETED
                )
                for task in settled_tasks:
                    dialled_calls = pending_dials.pop(task)
                    targets -= 1
                    if dialled_calls.is_connected or targets <= 0:
                        return dialled_calls
                    await dialled_calls.close()
    finally:
        for task in pending_dials:
            task.cancel()
        await asyncio.gather(*pending_dials, return_exceptions=True)
        for calls in pending_dials.values():
            await calls.close()

"""Watches the packages that the worker has workloads from, so that a change needs no restart."""

import asyncio
from collections.abc import Awaitable, Callable

import structlog

from gpu_node.shell.worker.protocol import WorkerCapabilities
from gpu_node.shell.worker_host.supervision import WorkerSupervisor
from hypergpu.errors import HyperGPUError
from hypergpu.workloads.installed import PackageWatch

log = structlog.get_logger()

_LOOK_S = 10.0
_SETTLE_S = 2.0
"""Time between two looks while an installer may be at work."""


async def watch_packages(
    worker: WorkerSupervisor,
    offer: Callable[[WorkerCapabilities], Awaitable[None]],
    limit_s: float,
) -> None:
    """Start the worker anew once packages have changed, it is idle, and nothing changes any more.

    Args:
        worker: The daemon's.
        offer: Called with what the new worker can train.
        limit_s: Time in which that worker has to be ready.
    """
    watch = await asyncio.to_thread(PackageWatch)
    changes: list[str] = []
    while True:
        await asyncio.sleep(_SETTLE_S if changes else _LOOK_S)
        # A thread for what nearly always is a few calls of `stat` costs twenty times as much.
        if watch.has_changed() and (change := await asyncio.to_thread(_look, watch)):
            changes.append(change)  # an installer may not be done
        elif changes and not worker.is_at_work:
            log.info("workload packages changed, the worker starts anew", changes=changes)
            changes.clear()
            try:
                await offer(await worker.start_anew(limit_s))
            except HyperGPUError as error:
                log.warning("the worker will be started again", reason=error.detail)


def _look(watch: PackageWatch) -> str:
    try:
        return watch.look()
    except Exception:  # an installer may leave anything, and the next look may succeed
        log.exception("the packages with workloads cannot be looked at")
        return ""

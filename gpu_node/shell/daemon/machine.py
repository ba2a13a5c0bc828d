"""The nodes of one machine: one for each of its devices, in one process.

The first node has the machine's own folder, as on a machine with one device; each further one has a
folder ``device-N`` in it. They share the join line, the passphrase and the owner's limits, and
nothing else.
"""

import asyncio
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import NamedTuple

import structlog

from gpu_node.config import NodeSettings
from gpu_node.core.commands import Departure, Leave
from gpu_node.core.devices import chosen_devices, device_limits, part_of
from gpu_node.core.limits import OwnerLimits
from gpu_node.core.session_state import LinkPhase
from gpu_node.shell.daemon.app import Daemon
from gpu_node.shell.folder.state import StatePaths, load_coordinator, node_name
from gpu_node.shell.owner.interpreter import WorkerPython, gpu_build_command, worker_python
from gpu_node.shell.owner.limits_file import found_gpus
from hypergpu.errors import HyperGPUError, Reason
from hypergpu.keys import Passphrase, passphrase_beside
from hypergpu.node_report import DEVICE_FOLDER
from hypergpu.wire.credentials import Token

log = structlog.get_logger()


class MachineOrder(NamedTuple):
    """What all nodes of the machine are started with."""

    settings: NodeSettings
    limits: OwnerLimits
    token: Token | None = None
    passphrase: Passphrase | None = None
    log_file: Path | None = None


@contextmanager
def machine_daemons(paths: StatePaths, order: MachineOrder) -> Iterator[list[Daemon]]:
    """The daemons of a machine, whose folders are locked for as long as the block lasts.

    Args:
        paths: The machine's folder, whose lock the caller holds.
        order: What they are started with.

    Raises:
        HyperGPUError: ARGUMENT_INVALID, there are no such devices; WORKER_UNUSABLE, there is no
            Python for the worker.
    """
    settings, limits = order.settings, order.limits
    python = worker_python(settings, paths.root, limits.gpu)
    if python.path != sys.executable:
        # Found or made once for all devices.
        settings = settings.model_copy(update={"worker_python": python.path})
        order = order._replace(settings=settings)
    try:
        devices = serving_devices(settings.devices or "", limits, python)
    except ValueError as wrong:
        fix = "list them: nvidia-smi -L; then --device 0 --device 1, or --device cpu"
        raise HyperGPUError(Reason.ARGUMENT_INVALID, str(wrong), fix=fix) from wrong
    with ExitStack() as stack:
        first = _order_of_device(order, devices[0], len(devices)) if devices else order
        daemons = [_daemon(paths, first)]
        if len(devices) > 1 and order.passphrase is None:
            order = order._replace(passphrase=passphrase_beside(paths.root, paths.identity))
        for number, device in enumerate(devices[1:], 2):
            own = stack.enter_context(
                StatePaths(paths.root / DEVICE_FOLDER.format(number), machine=paths.root)
            )
            if order.token is None and load_coordinator(own) is None:
                log.warning("a device has not joined", device=device, fix="join with a token again")
                continue
            part = _order_of_device(order, device, len(devices))
            name = f"{node_name(paths, settings.name)}-{number}"
            part = part._replace(settings=part.settings.model_copy(update={"name": name}))
            daemons.append(_daemon(own, part))
        yield daemons


def serving_devices(stated: str, limits: OwnerLimits, python: WorkerPython) -> tuple[str, ...]:
    """The devices that get a node each; none: one node, also where torch cannot use the GPUs.

    Raises:
        ValueError: See `chosen_devices`.
    """
    gpus = found_gpus() if python.kind == "torch" else ()
    if python.kind == "torch" and gpus and not python.uses_gpus:
        log.warning(
            "torch is built for processors: its GPUs are not used",
            gpus=len(gpus),
            torch=python.torch,
            fix=gpu_build_command(python, limits.gpu),
        )
        if not stated:
            return ()
    return chosen_devices(stated, limits, gpus)


def _order_of_device(order: MachineOrder, device: str, count: int) -> MachineOrder:
    settings = order.settings
    changes = {
        "worker_threads": part_of(settings.worker_threads, count),
        "worker_memory_bytes": settings.worker_memory_bytes // count,
        "cache_bytes": settings.cache_bytes // count,
    }
    return order._replace(
        settings=settings.model_copy(update=changes),
        limits=device_limits(order.limits, device, count),
    )


def _daemon(paths: StatePaths, order: MachineOrder) -> Daemon:
    daemon = Daemon(
        order.settings,
        paths,
        token=order.token,
        passphrase=order.passphrase,
        log_file=order.log_file,
        limits=order.limits,
    )
    daemon.reporter.owner_limits = order.limits
    return daemon


async def serve_machine(daemons: Sequence[Daemon]) -> list[Leave]:
    """Run the daemons until all have left; the first SIGTERM drains them, a second one stops them.

    One that leaves, or that its coordinator rejects, leaves the others at work. An error of one
    drains the others, so that what started this process starts all of them anew.

    Raises:
        HyperGPUError: The first error of a daemon, once all have ended.
    """
    loop = asyncio.get_running_loop()
    daemons_at_work = [
        loop.create_task(_serve(daemon, number if len(daemons) > 1 else 0))
        for number, daemon in enumerate(daemons, 1)
    ]
    for task in daemons_at_work:
        task.add_done_callback(partial(_drain_after_error, daemons, daemons_at_work))
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(
            number, _on_signal, daemons, daemons_at_work, signal.Signals(number).name
        )
    ends = await asyncio.gather(*daemons_at_work, return_exceptions=True)
    leaves = [_leave_of(end) for end in ends]
    for end in ends:
        if isinstance(end, Exception):
            raise end
    return leaves


async def _serve(daemon: Daemon, number: int) -> Leave:
    if number:
        structlog.contextvars.bind_contextvars(device_node=number)
    return await daemon.run()


def _drain_after_error(
    daemons: Sequence[Daemon],
    serving: Sequence["asyncio.Task[Leave]"],
    ended: "asyncio.Task[Leave]",
) -> None:
    error = None if ended.cancelled() else ended.exception()
    if error is None or len(daemons) == 1:
        return
    log.error(
        "a device's node failed, the others drain",
        number=serving.index(ended) + 1,
        reason=str(error),
    )
    for daemon, task in zip(daemons, serving, strict=True):
        if not task.done() and not daemon.session.drain:
            daemon.drain("the node of another device failed")


def _leave_of(end: Leave | BaseException) -> Leave:
    if isinstance(end, Leave):
        return end
    return Leave(Departure.DRAINED, "stopped before it had begun")


def _on_signal(
    daemons: Sequence[Daemon], serving: Sequence["asyncio.Task[Leave]"], name: str
) -> None:
    for daemon, task in zip(daemons, serving, strict=True):
        if task.done():
            continue
        if daemon.session.link.phase is LinkPhase.DOWN:
            task.cancel()
        elif daemon.session.drain:
            daemon.stop(f"a second {name}")
        else:
            daemon.drain(name)

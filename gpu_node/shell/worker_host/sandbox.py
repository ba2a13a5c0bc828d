"""The worker's sandbox, with those parts of this machine that a worker may see."""

import contextlib
import os
from collections.abc import Iterable
from pathlib import Path

import structlog

from gpu_node.config import NodeSettings
from gpu_node.core.limits import OwnerLimits
from gpu_node.shell.folder.state import StatePaths
from gpu_node.shell.worker.protocol import SLOWNESS_FILE
from hypergpu.keys import place_beside
from hypergpu.sandbox.sandbox import (
    Sandbox,
    SandboxKind,
    WorkerFolders,
    chosen_sandbox,
    datasets_folder,
)

log = structlog.get_logger()


def worker_sandbox(
    paths: StatePaths, settings: NodeSettings, limits: OwnerLimits, python: Iterable[Path]
) -> Sandbox:
    """The worker's sandbox, tried with those parts of this machine that the worker may see.

    Args:
        paths: The node's folder.
        settings: Name the sandbox, and the file of the passphrase.
        limits: Name the folders of data, each of which is seen by the workers of its jobs alone.
        python: The folders of the worker's Python.
    """
    datasets = datasets_folder(os.environ)
    with contextlib.suppress(OSError):
        # Shown to the worker from the start, and filled by the daemon.
        datasets.mkdir(parents=True, exist_ok=True)
    readable = [paths.inputs, datasets, *python]
    if slowness := os.environ.get(SLOWNESS_FILE):
        readable.append(Path(slowness).parent)
    hidden_paths = [paths.machine, place_beside(paths.machine), *map(Path, limits.data.values())]
    if settings.passphrase_file is not None:
        hidden_paths.append(settings.passphrase_file.expanduser())
    real = tuple(dict.fromkeys(each.resolve() for each in hidden_paths))
    writable = (paths.scratch, paths.open_folder)
    folders = WorkerFolders(writable, tuple(readable), real, limits.gpu != "none")
    sandbox = chosen_sandbox(SandboxKind(settings.sandbox), folders)
    if sandbox.kind is SandboxKind.OFF:
        log.warning("the worker runs without a sandbox", reason=sandbox.text)
    return sandbox

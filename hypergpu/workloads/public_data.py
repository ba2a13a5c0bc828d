"""Public datasets of the built-in workloads: whoever starts a process in a sandbox has them
downloaded, since that process has no network.
"""

import asyncio
import os
import sys
from asyncio.subprocess import DEVNULL, PIPE
from collections.abc import Mapping, Sequence

from hypergpu.errors import HyperGPUError, Reason
from hypergpu.sandbox.sandbox import datasets_folder, worker_environment
from hypergpu.workloads.built_in import BUILT_IN

_PUBLIC = frozenset({"cifar10", "mnist"})
FETCH_MODULE = "hypergpu.workloads.networks.fetch"
_ANSWER_CHARACTERS = 300


def fetch_command() -> tuple[str, ...]:
    """The command that downloads by this process's own Python."""
    safe = ("-P",) if sys.flags.safe_path else ()
    return (sys.executable, *safe, "-m", FETCH_MODULE)


class PublicDatasets:
    """Downloads public datasets, one at a time.

    Args:
        command: Downloads the dataset whose name is added to it.
        environment: Variables that name the folder of datasets, and that the command gets.
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str] = os.environ) -> None:
        self._command = command
        self._environment = environment
        self._lock = asyncio.Lock()

    def missing(self, workload: str) -> str:
        """Name of the public dataset that a workload needs and that is not here; else empty."""
        name = next((each.dataset for each in BUILT_IN if each.name == workload), "")
        is_missing = name in _PUBLIC and not (datasets_folder(self._environment) / name).is_dir()
        return name if is_missing else ""

    async def fetch(self, workload: str) -> None:
        """Download what a workload lacks.

        Raises:
            HyperGPUError: WORKER_UNUSABLE, it cannot be downloaded.
        """
        async with self._lock:
            if name := self.missing(workload):
                await self._download(name)

    async def _download(self, name: str) -> None:
        folder = datasets_folder(self._environment)
        process = await asyncio.create_subprocess_exec(
            *self._command,
            name,
            stdin=DEVNULL,
            stdout=DEVNULL,
            stderr=PIPE,
            env=worker_environment(self._environment) | {"HYPERGPU_DATASETS": str(folder)},
        )
        try:
            _, output = await process.communicate()
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        if process.returncode:
            lines = output.decode("utf-8", "replace").strip().splitlines() or ["it says nothing"]
            raise HyperGPUError(Reason.WORKER_UNUSABLE, lines[-1][:_ANSWER_CHARACTERS])

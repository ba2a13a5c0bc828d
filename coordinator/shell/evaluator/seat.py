"""One evaluator's process in its sandbox: it serves one job from its first request to its end."""

import asyncio
import os
import secrets
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import NamedTuple

import psutil
import structlog
from msgspec.structs import replace

from coordinator.core.hub.evaluator_turns import EvaluatorPlaces
from coordinator.shell.evaluator.process import (
    ANSWER_TIMEOUT_S,
    COMMAND,
    EvaluatorFailure,
    EvaluatorProcess,
    EvaluatorReply,
    EvaluatorRequest,
    Initialise,
    Initialised,
    Warm,
)
from coordinator.shell.evaluator.staging import SeatFolders, staged_request, take_outputs
from hypergpu.keys import place_beside
from hypergpu.process import memory_of
from hypergpu.sandbox.sandbox import (
    Sandbox,
    SandboxKind,
    WorkerFolders,
    chosen_sandbox,
    datasets_folder,
    python_folders,
)
from hypergpu.workloads.public_data import PublicDatasets, fetch_command

log = structlog.get_logger()

EVALUATORS = "evaluators"
"""The folder of all evaluators' folders within the coordinator's own."""
_MEMORY_LEAST, _MEMORY_USUAL = 1 << 30, 16 << 30
_PLACES_LEAST = 2
LIGHT_BYTES = 1 << 30
"""A process that takes no more may rest beside those that work: torch alone takes a third of it."""


class EvaluatorLimits(NamedTuple):
    """What evaluators may take."""

    answer_s: float = ANSWER_TIMEOUT_S
    """Most seconds of one answer."""
    memory_bytes: int = 0
    """Most memory of one process; 0: a part of the machine's."""
    places: int = 0
    """Processes at work at once; 0: as many as suit the machine, two at least."""
    resting: int = 0
    """Further processes that may rest, of `LIGHT_BYTES` at most each."""
    spares: int = 1
    """Processes that are ready for the next job and have seen none."""
    sandbox: SandboxKind = SandboxKind.AUTO

    @property
    def evaluator_places(self) -> EvaluatorPlaces:
        """How many processes there may be."""
        return EvaluatorPlaces(self.places, self.places + self.resting)


def limits_here(limits: EvaluatorLimits, machine_bytes: int, processors: int) -> EvaluatorLimits:
    """The limits with those that are not stated (0) as they suit a machine.

    A process may take three eighths of the memory, so that two fit; where there is more, 16 GiB, or
    an eighth if that is more. As many work at once as fit into three quarters of the memory, and as
    there are processors. Those that rest take a quarter at most.
    """
    usual = min(machine_bytes * 3 // 8, max(_MEMORY_USUAL, machine_bytes // 8))
    memory = limits.memory_bytes or max(_MEMORY_LEAST, usual)
    fitting_places = min(processors, machine_bytes * 3 // 4 // memory)
    places = limits.places or max(_PLACES_LEAST, fitting_places)
    resting_places = machine_bytes // 4 // LIGHT_BYTES
    return limits._replace(memory_bytes=memory, places=places, resting=resting_places)


def clear_seats(data_dir: Path) -> None:
    """Remove the folders of an earlier coordinator's evaluators. Blocks."""
    SeatFolders(data_dir / EVALUATORS).remove()


class SeatMaker:
    """Makes seats under one folder. The first one tries which sandbox starts.

    Args:
        data_dir: The coordinator's folder, which no evaluator sees.
        limits: Complete ones, as `limits_here` gives them.
        command: Of the process.
        environment: Variables that evaluators may get some of.
    """

    def __init__(
        self,
        data_dir: Path,
        limits: EvaluatorLimits,
        command: tuple[str, ...] = COMMAND,
        environment: Mapping[str, str] = os.environ,
    ) -> None:
        self._data_dir = data_dir.absolute()
        self.limits = limits
        self._command = command
        self._environment = environment
        self._sandbox: Sandbox | None = None
        self._choosing = asyncio.Lock()
        self._datasets = PublicDatasets(fetch_command(), environment)

    async def seat(self) -> "EvaluatorSeat":
        """A seat with fresh folders and no process yet.

        Raises:
            HyperGPUError: MACHINE_UNFIT, the operator named a sandbox that does not start.
            OSError: The disk fails.
        """
        folders = SeatFolders(self._data_dir / EVALUATORS / secrets.token_hex(6))
        await asyncio.to_thread(folders.make)
        sandbox = await self._sandbox_of(folders)
        process = EvaluatorProcess(
            sandbox.command(self._command),
            environment=sandbox.environment(self._environment),
            answer_timeout_s=self.limits.answer_s,
            memory_bytes=self.limits.memory_bytes,
        )
        return EvaluatorSeat(folders, process, self._datasets)

    async def _sandbox_of(self, folders: SeatFolders) -> Sandbox:
        places = self._places(folders)
        async with self._choosing:
            if self._sandbox is None:
                sandbox = await asyncio.to_thread(chosen_sandbox, self.limits.sandbox, places)
                if sandbox.kind is SandboxKind.OFF:
                    log.warning("evaluators run without a sandbox", reason=sandbox.text)
                else:
                    log.info("evaluators run in a sandbox", sandbox=sandbox.text)
                self._sandbox = sandbox
        return self._sandbox._replace(folders=places)

    def _places(self, folders: SeatFolders) -> WorkerFolders:
        datasets = datasets_folder(self._environment)
        with suppress(OSError):
            # Shown to evaluators from the start, and filled beside them.
            datasets.mkdir(parents=True, exist_ok=True)
        hidden_paths = (self._data_dir, place_beside(self._data_dir))
        real = tuple(dict.fromkeys(each.resolve() for each in hidden_paths))
        folder_names = self._environment.get("PYTHONPATH", "").split(os.pathsep)
        packages = python_folders(Path(each) for each in folder_names if each)
        return WorkerFolders((folders.work,), (folders.inputs, datasets, *packages), real)


class EvaluatorSeat:
    """One process with its folders. Requests of one job go through it, one at a time."""

    def __init__(
        self, folders: SeatFolders, process: EvaluatorProcess, datasets: PublicDatasets
    ) -> None:
        self._folders = folders
        self._process = process
        self._datasets = datasets

    @property
    def process_id(self) -> int | None:
        """Id of the running process; None when there is none."""
        return self._process.process_id

    async def is_light(self) -> bool:
        """Whether the process takes little memory now."""
        process_id = self._process.process_id
        return process_id is None or await asyncio.to_thread(memory_of, process_id) <= LIGHT_BYTES

    async def warm(self, workload: str) -> bool:
        """Start the process and import what jobs of a workload need; tells whether it did."""
        return await self._process.warm(Warm(workload=workload))

    async def reply(self, request: EvaluatorRequest) -> EvaluatorReply:
        """The reply to a request, whose paths are the coordinator's.

        Raises:
            HyperGPUError: As of `EvaluatorProcess`; WORKER_UNUSABLE, a public dataset is not here
                and cannot be downloaded.
        """
        if isinstance(request, Initialise) and not request.data_dir:
            # An evaluator has no network.
            await self._datasets.fetch(request.workload)
        stack = ExitStack()
        try:
            inside = await asyncio.to_thread(
                stack.enter_context, staged_request(self._folders, request)
            )
            reply = await self._process.reply(inside)
        finally:
            await asyncio.shield(asyncio.to_thread(stack.close))
        if isinstance(reply, Initialised):
            await asyncio.to_thread(take_outputs, self._folders, request)
        if isinstance(reply, EvaluatorFailure) and inside.data_dir:
            # The user knows the files by their names among the data.
            return replace(reply, detail=reply.detail.replace(f"{inside.data_dir}/", ""))
        return reply

    async def close(self) -> None:
        """End the process at once, with all that it wrote."""
        await self._process.end()
        await asyncio.to_thread(self._folders.remove)


def machine_limits(limits: EvaluatorLimits) -> EvaluatorLimits:
    """The limits as they suit this machine."""
    return limits_here(limits, psutil.virtual_memory().total, os.cpu_count() or 1)

"""Completes the request of a fine-tuning with what the coordinator has of it: files of the base,
which are part of the training's data, the adapter's layout and its newest version.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import PurePosixPath

from msgspec.structs import replace

from coordinator.core.serving.events import ServeCreated
from coordinator.shell.driver.driver import Driver
from coordinator.shell.driver.kinds import TrainedModelFiles
from coordinator.shell.kinds.performers.file_admission import admit_files
from coordinator.shell.kinds.performers.packed_work import ForeignBlobs
from coordinator.shell.store.blobs.manifests import stored_manifest
from coordinator.shell.store.storage import Storage
from hypergpu.blobs import BlobRef
from hypergpu.errors import HyperGPUError, Reason
from hypergpu.farm.base_files import is_base_file
from hypergpu.ids import Digest, JobId
from hypergpu.serving.tuned_model import (
    TUNED_BASE_FILES_MOST,
    Tuning,
    TuningSource,
    untrained_adapter,
)
from hypergpu.wire.messages import blob_value
from hypergpu.workloads.finetuning.row_files import BASE_FOLDER

_NOBODYS_FILE = Digest("0" * 64)


class Tunings:
    """Trainings whose models are served.

    Args:
        driver: Drives them.
        storage: Holds their files.
    """

    def __init__(self, driver: Driver, storage: Storage) -> None:
        self._driver = driver
        self._storage = storage

    @asynccontextmanager
    async def admit(
        self, event: ServeCreated, source: TuningSource, foreign: ForeignBlobs
    ) -> AsyncIterator[ServeCreated]:
        """The event with the model of its training; the files stay stored until it is journalled.

        Args:
            event: As the request has it.
            source: The training.
            foreign: Tells which blobs the caller has not shown to have.

        Raises:
            HyperGPUError: JOB_UNKNOWN, the caller has no such job; else its model cannot be served,
                or is not there.
        """
        runtime = self._driver.runtimes.get(source.job)
        # An operator may name any file, and anybody else none that nobody has.
        is_stranger = bool(foreign(frozenset([_NOBODYS_FILE])))
        if runtime is None or (runtime.job.owner != event.owner and is_stranger):
            raise _unknown_job(source.job)
        files = self.files_of(source)
        if files.is_base:
            await asyncio.to_thread(self._storage.blobs.put, untrained_adapter(files.layout))
        base = await asyncio.to_thread(self._base_files, files)
        layout = await asyncio.to_thread(self._storage.blobs.put, files.layout.to_json())
        job_tuning = Tuning(
            job=source.job,
            workload=files.workload,
            options=dict(files.options),
            layout=layout,
            version=files.version,
            follows=source.follows and not files.has_ended,
        )
        complete_event = replace(
            event,
            files=base,
            tuning=job_tuning,
            training=source.job,
            rounds=files.version.round,
        )
        blobs = (*base.values(), *job_tuning.blobs)
        async with admit_files(self._storage, blobs, lambda _: frozenset()):
            yield complete_event

    def files_of(self, source: TuningSource) -> TrainedModelFiles:
        """The model of a training as it is now.

        Raises:
            HyperGPUError: JOB_UNKNOWN, there is no such job; else as `ShellKind.trained_model`.
        """
        runtime = self._driver.runtimes.get(source.job)
        if runtime is None:
            raise _unknown_job(source.job)
        return self._driver.kinds.of_job(runtime.job).trained_model(runtime, source)

    def files_if_there(self, source: TuningSource) -> TrainedModelFiles | None:
        """The model of a training as it is now; None: it is not known now."""
        try:
            return self.files_of(source)
        except HyperGPUError:
            return None

    def change_of(self, job_id: JobId) -> asyncio.Event | None:
        """Set when anything of a training changes; None: it is not there."""
        runtime = self._driver.runtimes.get(job_id)
        return None if runtime is None else runtime.change()

    def _base_files(self, files: TrainedModelFiles) -> dict[str, BlobRef]:
        """Files of the base, by their names in its folder. Blocks."""
        if files.manifest is None:
            raise HyperGPUError(Reason.REQUEST_INVALID, "the training has no data with a base")
        manifest = stored_manifest(self._storage.blobs, files.manifest)
        base = {
            path.name: blob_value(entry.blob)
            for entry in manifest.entries
            if (path := PurePosixPath(entry.path)).parent == PurePosixPath(BASE_FOLDER)
            and is_base_file(path.name)
        }
        if not 0 < len(base) <= TUNED_BASE_FILES_MOST:
            detail = f"the base of the training has {len(base)} files"
            fix = f"save it in 1 to {TUNED_BASE_FILES_MOST} files, or serve a merged export"
            raise HyperGPUError(Reason.REQUEST_INVALID, detail, fix=fix)
        return base


def _unknown_job(job_id: str) -> HyperGPUError:
    detail = f"there is no training {job_id[:100]!r} of this token"
    return HyperGPUError(Reason.JOB_UNKNOWN, detail, fix="hypergpu job ls lists jobs")

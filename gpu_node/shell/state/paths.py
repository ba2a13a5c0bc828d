"""The paths under the state folder of a node."""

import fcntl
import os
import shutil
from collections.abc import Container
from pathlib import Path
from typing import Self

from hypergpu.errors import HyperGPUError, Reason
from hypergpu.ids import JobId, JobKey
from hypergpu.statements.domain import word_bytes


class StatePaths:
    """The state folder. Holding it open is holding its lock: two daemons never share one."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.identity = root / "identity.key"
        self.tls_key = root / "tls.key"
        self.certificate = root / "tls.crt"
        self.authority = root / "authority.crt"
        self.coordinator = root / "coordinator.json"
        self.memory = root / "memory.json"
        self.worker = root / "worker.json"
        self.name = root / "name"
        self.nonce = root / "nonce"
        self.blobs = root / "blobs"
        self.datasets = root / "datasets"
        self.jobs = root / "jobs"
        self.ledger = root / "ledger"
        """Receipts, which outlive their jobs: see `gpu_node.shell.state.receipts`."""
        self._lock: int | None = None

    def __enter__(self) -> Self:
        """Make the folder, readable by its owner alone, and lock it.

        Raises:
            HyperGPUError: STATE_LOCKED, another daemon uses it; FILE_UNUSABLE, it cannot be made.
        """
        try:
            for folder in (self.root, self.blobs, self.datasets, self.jobs):
                folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            lock = os.open(self.root / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as broken:
            detail = f"the state folder {self.root} cannot be used: {broken.strerror}"
            raise HyperGPUError(Reason.FILE_UNUSABLE, detail) from broken
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            detail = f"another node daemon uses {self.root}"
            raise HyperGPUError(Reason.STATE_LOCKED, detail) from None
        self._lock = lock
        return self

    def __exit__(self, *_: object) -> None:
        """Release the lock."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def job(self, job_id: JobId) -> Path:
        """The folder of one job's end states and updates."""
        if Path(job_id).name != job_id or job_id in {"", ".", ".."}:
            raise HyperGPUError(Reason.REQUEST_INVALID, f"{job_id[:80]!r} is no job's id")
        return self.jobs / job_id

    def ledger_of(self, job: JobKey) -> Path:
        """The folder of a job's receipts."""
        return self.ledger / word_bytes(job).hex()

    def update(self, job_id: JobId, round_number: int) -> Path:
        """The update of one round."""
        return self.job(job_id) / f"update-{round_number}"

    def delete_job(self, job_id: JobId) -> None:
        """Delete the end states and updates of a job."""
        shutil.rmtree(self.job(job_id), ignore_errors=True)

    def delete_other_jobs(self, job_ids: Container[JobId]) -> None:
        """Delete the folders of all other jobs than these."""
        for folder in self.jobs.iterdir():
            if folder.name not in job_ids:
                self.delete_job(JobId(folder.name))

    def delete_unfinished(self, job_id: JobId, kept_rounds: tuple[int, ...]) -> None:
        """Delete end states and updates of a job's other rounds, whose training never finished.

        One of them left in place would push out, as the newer one, the end state that a rollback
        needs.
        """
        folder = self.job(job_id)
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        kept = {f"{kind}-{number}" for kind in ("end", "update") for number in kept_rounds}
        for path in folder.iterdir():
            if path.name.partition(".")[0] not in kept:
                path.unlink()

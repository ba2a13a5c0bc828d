"""One training job in this process."""

import asyncio
from collections.abc import Mapping
from typing import Any

from coordinator.core.hub.evaluator_turns import EvaluatorJob
from coordinator.core.training.job.state import Job
from coordinator.shell.aggregation.measurements import RoundMeasurements
from coordinator.shell.driver.work_runtime import WorkRuntime
from coordinator.shell.kinds.training.workload_versions import catalogue_version
from hypergpu.ids import Digest, JobId, NodeId
from hypergpu.tensors.layout import Layout
from hypergpu.units import Bytes


class JobRuntime(WorkRuntime[Job]):
    """One training job in this process, with what is known of its model and its files."""

    progress_version = 0
    """Raised whenever a participant says how far it is."""

    def __init__(self, job: Job, next_sequence: int) -> None:
        super().__init__(job, next_sequence)
        self.workload_version = catalogue_version(job.spec.workload)
        """0 when the catalogue no longer has the workload: then no node fits it."""
        self.operators = frozenset(job.operators)
        """Operators of torch that its nodes must have; known a moment before the journal is."""
        self.layout: Layout | None = None
        """The model's layout; None until the first model is made."""
        self.entries_of_manifest = frozenset[Digest]() if job.manifest is None else None
        """The user's files that the job trains on; None until its manifest is read."""
        self.bytes_down = Bytes(0)
        """Model bytes served since the last aggregate."""
        self.measurements = RoundMeasurements()
        self.settings_lock = asyncio.Lock()
        """Held while new settings are made out of the present ones and written."""

    @property
    def required_layout(self) -> Layout:
        """The model's layout, for commands that come only once it is known."""
        if self.layout is None:
            raise AssertionError("the model's layout is not known yet")
        return self.layout

    def open_uploads(self) -> list[str]:
        """Uploads that participants may make now, as the quarantine names them."""
        participants = self.job.round.participants if self.job.round else {}
        return [
            upload_owner(self.job.job_id, node)
            for node, participant in (*participants.items(), *self.job.long_leases.items())
            if participant.is_open
        ]

    def close(self) -> None:
        """Drop timers and tasks."""
        super().close()
        for task in self.measurements.tasks:
            task.cancel()


TrainingJobs = Mapping[JobId, JobRuntime]
"""Training jobs of a driver."""


def training_of(runtime: WorkRuntime[Any] | None) -> JobRuntime | None:
    """The job, if it is a training job."""
    return runtime if isinstance(runtime, JobRuntime) else None


def evaluated_job(runtime: JobRuntime) -> EvaluatorJob:
    """A job as the evaluators know it."""
    return EvaluatorJob(runtime.job.job_id, runtime.job.owner)


def upload_owner(job_id: JobId, node: NodeId) -> str:
    """A node in one job, as the quarantine knows it: it has one upload at a time."""
    return f"update/{job_id}/{node}"

"""One training job in this process."""

import asyncio
from collections.abc import Mapping
from typing import Any

from coordinator.core.hub.evaluator_turns import EvaluatorJob
from coordinator.core.training.experts import expert_windows
from coordinator.core.training.job.state import Job
from coordinator.shell.aggregation.measurements import RoundMeasurements
from coordinator.shell.driver.work_runtime import WorkRuntime
from coordinator.shell.kinds.training.workload_versions import catalogue_version
from hypergpu.ids import Digest, JobId, NodeId
from hypergpu.tensors.layout import Layout
from hypergpu.tensors.partial import part_layout
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
        self.is_partial = job.mixture is not None and job.mixture.is_partial
        """Whether its nodes hold some experts of a mixture only; known a moment before the journal
        is, too.
        """
        self.layout: Layout | None = None
        """The model's layout; None until the first model is made."""
        self._held_layouts: dict[tuple[int, ...], Layout] = {}
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

    def held_layout(self, experts: tuple[int, ...]) -> Layout:
        """The layout of what holders of these experts have; of the whole model for none.

        The same object each time: what is derived of a layout is kept with it.
        """
        if not experts:
            return self.required_layout
        if experts not in self._held_layouts:
            self._held_layouts[experts] = part_layout(self.required_layout, experts)
        return self._held_layouts[experts]

    @property
    def node_layout(self) -> Layout:
        """The layout of what a node holds: parts of a mixture are about equally large."""
        mixture = self.job.mixture
        windows = expert_windows(mixture) if mixture is not None else ()
        return self.held_layout(windows[0] if windows else ())

    def layout_of_digest(self, digest: Digest) -> Layout | None:
        """The layout of the model, or of a part that nodes hold; None: it is neither."""
        model = self.job.model
        if self.layout is None:
            return None
        if digest == self.layout.digest:
            return self.layout
        parts = model.held_parts if model is not None else ()
        experts = next((each.experts for each in parts if each.layout == digest), None)
        return None if experts is None else self.held_layout(experts)

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

"""One served model in this process."""

from typing import Any

from coordinator.core.serving.state import ServeJob
from coordinator.shell.driver.work_runtime import WorkRuntime
from coordinator.shell.kinds.serving.answer_figures import AnswerFigures
from hypergpu.ids import Digest


class ServeRuntime(WorkRuntime[ServeJob]):
    """One served model in this process."""

    def __init__(self, job: ServeJob, next_sequence: int) -> None:
        super().__init__(job, next_sequence)
        self.figures = AnswerFigures()
        """Figures of its answers since this process began."""
        self.open_digests: dict[Digest, int] = {}
        """Blobs of rounds of a training that are not journalled yet, by the steps before them."""

    @property
    def input_digests(self) -> frozenset[Digest]:
        """Blobs that a replica needs."""
        return frozenset(blob.digest for blob in self.job.blobs)


def served_of(runtime: WorkRuntime[Any] | None) -> ServeRuntime | None:
    """The job, if it serves a model."""
    return runtime if isinstance(runtime, ServeRuntime) else None

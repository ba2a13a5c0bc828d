"""Why a training job waits, beyond what its journal tells."""

from typing import NamedTuple

from coordinator.core.training.job.state import ENDED, Phase
from coordinator.shell.engine.evaluation import Evaluators
from coordinator.shell.kinds.training.job_runtime import JobRuntime, evaluated_job
from coordinator.shell.nodes.allocator import NodeAllocator
from coordinator.shell.store.bulk.store import BulkStore

_WAITS_FOR_EVALUATOR = frozenset({Phase.PREPARING, Phase.AGGREGATING, Phase.FINISHING})


class WaitingReasons(NamedTuple):
    """Asks everything that a job may wait for."""

    bulk: BulkStore
    evaluators: Evaluators
    allocator: NodeAllocator

    def obstacle(self, runtime: JobRuntime) -> str:
        """Numbered reason for which a job waits; empty: it goes on, or has ended."""
        if runtime.job.phase in ENDED:
            return ""
        return runtime.obstacle or self.bulk.obstacle or self._evaluator_reason(runtime)

    def waiting_reason(self, runtime: JobRuntime) -> str:
        """Reason for which the job waits, with that of the nodes; empty: there is none."""
        obstacle = self.obstacle(runtime)
        if obstacle or runtime.job.phase not in {Phase.WAITING, Phase.PREPARING}:
            return obstacle
        return self.allocator.outlook(runtime.job.job_id)

    def _evaluator_reason(self, runtime: JobRuntime) -> str:
        """Why the job waits for an evaluator; empty where it does not, or has other work."""
        if runtime.job.phase not in _WAITS_FOR_EVALUATOR:
            return ""
        return self.evaluators.waiting_reason(evaluated_job(runtime))

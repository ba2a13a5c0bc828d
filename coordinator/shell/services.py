"""The services of a coordinator, which commands and servicers get instead of anything global, and
what several of them together say about a job or a blob.
"""

from pathlib import Path
from typing import NamedTuple

from coordinator.config import Settings
from coordinator.core.hub.evaluator_turns import EvaluatorJob
from coordinator.core.training.job.blobs import live_blobs
from coordinator.core.training.job.state import ENDED, Phase
from coordinator.shell.driver.driver import Driver
from coordinator.shell.driver.job_runtime import JobRuntime
from coordinator.shell.driver.job_terms import NewJobTerms
from coordinator.shell.engine.evaluation import EngineEvaluator
from coordinator.shell.engine.heavy_work import HeavyWork
from coordinator.shell.evaluator.pool import EvaluatorPool
from coordinator.shell.nodes.allocator import NodeAllocator
from coordinator.shell.nodes.connected_nodes import ConnectedNodes
from coordinator.shell.nodes.fleet_health import FleetHealth
from coordinator.shell.nodes.readings import Readings
from coordinator.shell.nodes.update_offers import UpdateOffers
from coordinator.shell.probe_echo import ProbeEcho
from coordinator.shell.store.blobs.pins import Pins
from coordinator.shell.store.blobs.store import BlobStore
from coordinator.shell.store.blobs.upload_commits import Commits
from coordinator.shell.store.blobs.upload_store import UploadStore
from coordinator.shell.store.bulk.store import BulkStore
from coordinator.shell.store.journal.coordinators import OtherCoordinators
from coordinator.shell.store.journal.journal import Journal
from hypergpu.ids import Digest, JobId

DATASETS = "datasets"
"""The folder of users' data within the coordinator's own."""


_WAITS_FOR_EVALUATOR = frozenset({Phase.PREPARING, Phase.AGGREGATING, Phase.FINISHING})


def evaluated_job(runtime: JobRuntime) -> EvaluatorJob:
    """A job as the evaluators know it."""
    return EvaluatorJob(runtime.job.job_id, runtime.job.owner)


class Services(NamedTuple):
    """Everything, wired in `coordinator.shell.app.startup`."""

    settings: Settings
    journal: Journal
    blobs: BlobStore
    uploads: UploadStore
    evaluator: EvaluatorPool | EngineEvaluator
    driver: Driver
    nodes: ConnectedNodes
    allocator: NodeAllocator
    pins: Pins
    offers: UpdateOffers
    commits: Commits
    heavy: HeavyWork
    readings: Readings
    """Readings of every node's line and speed, made anew after a restart."""
    echo: ProbeEcho
    bulk: BulkStore
    job_terms: NewJobTerms
    others: OtherCoordinators
    """Coordinators that may take over from this one."""
    health: FleetHealth
    """Health of every node, which outlives restarts."""
    sketch_secret: bytes
    """32 bytes that the signs of all sketches follow from; nobody else may know them."""

    def job_dir(self, job_id: JobId) -> Path:
        """Where the shell keeps files of one job; deleted with it."""
        return self.settings.data_dir / "jobs" / job_id

    @property
    def datasets_dir(self) -> Path:
        """Users' data laid out as folders for the evaluator."""
        return self.settings.data_dir / DATASETS

    def obstacle(self, runtime: JobRuntime) -> str:
        """Numbered reason for which a job waits; empty: it goes on, or has ended."""
        if runtime.job.phase in ENDED:
            return ""
        return runtime.obstacle or self.bulk.obstacle or self._evaluator_reason(runtime)

    def waiting_reason(self, runtime: JobRuntime) -> str:
        """Reason for which the job waits, beyond what its journal tells; empty: there is none."""
        obstacle = self.obstacle(runtime)
        if obstacle or runtime.job.phase not in {Phase.WAITING, Phase.PREPARING}:
            return obstacle
        return self.allocator.outlook(runtime.job.job_id)

    def _evaluator_reason(self, runtime: JobRuntime) -> str:
        """Why the job waits for an evaluator; empty where it does not, or has other work."""
        if runtime.job.phase not in _WAITS_FOR_EVALUATOR:
            return ""
        return self.evaluator.waiting_reason(evaluated_job(runtime))

    def needed_blobs(self) -> frozenset[Digest]:
        """Every blob that some job is known to need."""
        found = set(self.pins.all())
        for runtime in self.driver.runtimes.values():
            found |= live_blobs(runtime.job) | (runtime.entries_of_manifest or frozenset())
            if runtime.job.phase not in ENDED:
                # A coordinator that takes over would have to make it anew.
                found.add(runtime.job.layout)
        return frozenset(found)

    def knows_needed_blobs(self) -> bool:
        """Whether no job may need more than `needed_blobs`."""
        runtimes = self.driver.runtimes.values()
        is_read = all(runtime.entries_of_manifest is not None for runtime in runtimes)
        return is_read and not self.driver.unreadable

"""The kinds of work that this coordinator drives: one entry a kind."""

from coordinator.core.hub.health import health_evidence
from coordinator.core.training.job.commands import CancelShard
from coordinator.core.training.kind import TRAINING
from coordinator.shell.driver.kinds import KindTable, ShellKind
from coordinator.shell.kinds.farm.entry import FARM_ENTRY
from coordinator.shell.kinds.serving.entry import SERVING_ENTRY
from coordinator.shell.kinds.training.demand import job_demand, unmet_reason, uses_nodes
from coordinator.shell.kinds.training.job_runtime import JobRuntime
from coordinator.shell.kinds.training.perform import TrainingPerformer, failed_without
from coordinator.shell.kinds.training.trained_models import trained_model

KINDS = KindTable(
    ShellKind(
        TRAINING,
        runtime=JobRuntime,
        performer=TrainingPerformer,
        demand=job_demand,
        uses_nodes=uses_nodes,
        unmet_reason=unmet_reason,
        while_recovering=(CancelShard,),
        evidence=health_evidence,
        without=failed_without,
        trained_model=trained_model,
    ),
    FARM_ENTRY,
    SERVING_ENTRY,
)
"""A kind is added by an entry here; `ShellKind` says what an entry is made of."""

"""The kinds of work that this coordinator drives: one entry a kind."""

from coordinator.core.hub.health import health_evidence
from coordinator.core.training.job.commands import CancelShard
from coordinator.core.training.kind import TRAINING
from coordinator.shell.driver.job_runtime import JobRuntime
from coordinator.shell.driver.kinds import KindTable, ShellKind
from coordinator.shell.kinds.training.perform import (
    end_drain,
    failed_without,
    note_time,
    perform_training,
)
from coordinator.shell.kinds.training.recovery import take_up

KINDS = KindTable(
    ShellKind(
        TRAINING,
        runtime=JobRuntime,
        perform=perform_training,
        take_up=take_up,
        while_recovering=(CancelShard,),
        after_drain=end_drain,
        after_command=note_time,
        evidence=health_evidence,
        without=failed_without,
    )
)
"""A kind is added by an entry here; `ShellKind` says what an entry is made of."""

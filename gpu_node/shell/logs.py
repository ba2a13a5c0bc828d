"""Log lines of the daemon: one for each event of its session."""

from collections.abc import Sequence

import structlog

from gpu_node.core.commands import Command, HandBack, Leave
from gpu_node.core.events import (
    Event,
    InputsFetched,
    ShardAssigned,
    TimerFired,
    TrainingFinished,
    TrainingProgressed,
    WorkerReady,
)

log = structlog.get_logger()

_ROUTINE = (TimerFired, InputsFetched, TrainingProgressed, WorkerReady)


def note(event: Event, commands: Sequence[Command]) -> None:
    """Tell what happened and what was given up because of it."""
    tell = log.debug if isinstance(event, _ROUTINE) else log.info
    tell(type(event).__name__, **_details(event))
    for command in commands:
        if isinstance(command, HandBack | Leave):
            log.info(type(command).__name__, **_details(command))


def _details(subject: Event | Command) -> dict[str, object]:
    details: dict[str, object] = {}
    held = subject.assignment if isinstance(subject, ShardAssigned) else subject
    lease = getattr(held, "lease", None)
    if lease is not None:
        details |= {"job_id": lease.job_id, "round": lease.round, "lease": lease.number}
    if isinstance(subject, TrainingFinished):
        details |= {"loss": subject.update.loss_last, "compute_ms": subject.update.compute_ms}
    if reason := getattr(held, "reason", ""):
        details["reason"] = reason
    return details

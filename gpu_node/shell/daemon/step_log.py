"""Log lines of a daemon's events, and of the work that is given up because of them."""

from typing import Any

import structlog

from gpu_node.core import commands, events

log = structlog.get_logger()

_ROUTINE = (events.TimerFired, events.InputsFetched, events.TrainingProgressed, events.WorkerReady)


def log_step(event: events.NodeEvent, todo: tuple[commands.NodeCommand, ...]) -> None:
    """Log an event, and the work given up because of it."""
    write = log.debug if isinstance(event, _ROUTINE) else log.info
    write(type(event).__name__, **_log_fields(event))
    for command in todo:
        if isinstance(command, commands.HandBack | commands.Leave):
            log.info(type(command).__name__, **_log_fields(command))


def _log_fields(subject: events.NodeEvent | commands.NodeCommand) -> dict[str, object]:
    fields: dict[str, object] = {}
    source: Any = subject
    if isinstance(subject, events.ShardAssigned | events.WorkAssigned):
        source = subject.assignment
    if (lease := getattr(source, "lease", None)) is not None:
        fields |= {"job_id": lease.job_id, "round": lease.round, "lease": lease.number}
    if isinstance(subject, events.TrainingFinished):
        fields |= {"loss": subject.update.loss_last, "compute_ms": subject.update.compute_ms}
    if reason := getattr(source, "reason", ""):
        fields["reason"] = reason
    return fields

"""What people read: one line for each thing that happened, JSON when nobody watches."""

import logging
import sys
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


def set_up_logs(level: str) -> None:
    """Write to stderr: lines for people on a terminal, JSON otherwise."""
    is_watched = sys.stderr.isatty()
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            structlog.dev.ConsoleRenderer() if is_watched else structlog.processors.JSONRenderer(),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(
            logging.getLevelNamesMapping()[level.upper()]
        ),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        cache_logger_on_first_use=True,
    )


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

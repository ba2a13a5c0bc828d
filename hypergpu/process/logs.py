"""Logs on stderr: for people on a terminal, JSON lines elsewhere. Stdout carries the ready line."""

import logging
import sys

import structlog


def configure_logs(level: int | str = logging.INFO) -> None:
    """Set structlog up for this process; ``level`` is a number or a name such as ``info``."""
    is_terminal = sys.stderr.isatty()
    renderer: structlog.typing.Processor = (
        structlog.dev.ConsoleRenderer() if is_terminal else structlog.processors.JSONRenderer()
    )
    tracebacks: list[structlog.typing.Processor] = (
        [] if is_terminal else [structlog.processors.format_exc_info]
    )
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            *tracebacks,
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=structlog.PrintLoggerFactory(file=sys.stderr),
        cache_logger_on_first_use=True,
    )

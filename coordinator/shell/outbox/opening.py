"""The outbox of a coordinator, where its configuration names a stream."""

from collections.abc import Callable

import structlog

from coordinator.shell.outbox.cursors import CursorStore
from coordinator.shell.outbox.outbox import Outbox, OutboxSource
from coordinator.shell.services import Services

log = structlog.get_logger()


def open_outbox(services: Services, set_serving: Callable[[bool], None]) -> Outbox | None:
    """Open it; None: no stream is named. The stream is not asked yet.

    Args:
        services: Of the coordinator.
        set_serving: Gets whether events are sent now, each time that it is known.

    Raises:
        HyperGPUError: ARGUMENT_INVALID, the address names no stream.
        ModuleNotFoundError: The extra of Redis is not installed.
    """
    settings = services.settings
    if not settings.events:
        return None
    from coordinator.shell.outbox.redis_stream import RedisStream, parse_address

    stream = RedisStream(parse_address(settings.events))
    source = OutboxSource(
        services.journal, lambda: services.driver.runtimes, services.job_terms.payments
    )
    said = [""]

    def tell(reason: str) -> None:
        set_serving(not reason)
        if reason != said[0]:
            said[0] = reason
            if reason:
                log.warning("events wait", reason=reason)
            else:
                log.info("events are sent again")

    return Outbox(source, stream, CursorStore(settings.database_url, settings.data_dir), tell)

"""The outbox of a coordinator, where its configuration names a stream."""

from collections.abc import Callable

import structlog

from coordinator.config import Settings
from coordinator.shell.driver.driver import Driver
from coordinator.shell.outbox.cursors import CursorStore
from coordinator.shell.outbox.outbox import Outbox, OutboxSource
from hypergpu.extension import PaymentsPlugin

log = structlog.get_logger()


def open_outbox(
    settings: Settings,
    driver: Driver,
    payments: PaymentsPlugin | None,
    set_serving: Callable[[bool], None],
) -> Outbox | None:
    """Open it; None: no stream is named. The stream is not asked yet.

    Args:
        settings: Name the stream.
        driver: Its journal has the events.
        payments: They have the receipts; None: there are none.
        set_serving: Gets whether events are sent now, each time that it is known.

    Raises:
        HyperGPUError: ARGUMENT_INVALID, the address names no stream.
        ModuleNotFoundError: The extra of Redis is not installed.
    """
    if not settings.events:
        return None
    from coordinator.shell.outbox.redis_stream import RedisStream, parse_address

    stream = RedisStream(parse_address(settings.events))
    source = OutboxSource(driver.journal, lambda: driver.runtimes, payments)
    last_reason = [""]

    def tell(reason: str) -> None:
        set_serving(not reason)
        if reason != last_reason[0]:
            last_reason[0] = reason
            if reason:
                log.warning("events wait", reason=reason)
            else:
                log.info("events are sent again")

    return Outbox(source, stream, CursorStore(settings.database_url, settings.data_dir), tell)

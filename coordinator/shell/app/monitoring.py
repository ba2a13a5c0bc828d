"""The coordinator's figures for a monitor, where its settings name a port for them."""

from functools import partial

from coordinator.config import Settings
from coordinator.shell.driver.driver import Driver
from coordinator.shell.metrics.server import (
    MetricsServer,
    OperatorCheck,
    admit_loopback,
    metrics_address,
    require_loopback,
)
from coordinator.shell.nodes.fleet import Fleet
from coordinator.shell.nodes.identity.tokens import IssuedTokens
from coordinator.shell.rate import GuessLimiter
from coordinator.shell.store.bulk.messages import Certificates
from hypergpu.wire.authority import is_loopback


async def open_metrics(
    settings: Settings,
    subjects: tuple[Driver, Fleet],
    judges: tuple[IssuedTokens, GuessLimiter],
    certificates: Certificates | None,
) -> MetricsServer:
    """Serve `/metrics` where the settings say; on loopback to everybody, else by TLS to operators.

    Raises:
        HyperGPUError: ADDRESS_UNUSABLE, the address is taken, none of this machine's, or one that
            others could dial in plaintext.
    """
    if not (address := settings.metrics_listen):
        return MetricsServer(_no_figures, admit_loopback)
    # A start without metrics does without what writes their text.
    from coordinator.shell.metrics.coordinator import coordinator_metrics

    figures = partial(coordinator_metrics, *subjects)
    if certificates is None or is_loopback(metrics_address(address)[0]):
        require_loopback(address, "the coordinator runs without TLS")
        server = MetricsServer(figures, admit_loopback)
    else:
        from coordinator.shell.store.bulk.server import tls_context

        server = MetricsServer(figures, OperatorCheck(*judges), tls_context(certificates))
    await server.open(address)
    return server


async def _no_figures() -> bytes:
    """The text of a server that nobody can ask."""
    return b""

"""The coordinator's figures for a monitor, where its settings name a port for them."""

from collections.abc import Awaitable, Callable

from coordinator.config import Settings
from coordinator.shell.metrics.server import (
    MetricsServer,
    OperatorCheck,
    admit_loopback,
    metrics_address,
    require_loopback,
)
from coordinator.shell.nodes.identity.tokens import IssuedTokens
from coordinator.shell.rate import GuessLimiter
from coordinator.shell.store.bulk.messages import Certificates
from hypergpu.wire.authority import is_loopback


async def open_metrics(
    settings: Settings,
    figures: Callable[[], Awaitable[bytes]],
    judges: tuple[IssuedTokens, GuessLimiter],
    certificates: Certificates | None,
) -> MetricsServer:
    """Serve `/metrics` where the settings say; on loopback to everybody, else by TLS to operators.

    Raises:
        HyperGPUError: ADDRESS_UNUSABLE, the address is taken, none of this machine's, or one that
            others could dial in plaintext.
    """
    address = settings.metrics_listen
    if address and is_loopback(metrics_address(address)[0]):
        server = MetricsServer(figures, admit_loopback)
    elif address and certificates is not None:
        from coordinator.shell.store.bulk.server import tls_context

        server = MetricsServer(figures, OperatorCheck(*judges), tls_context(certificates))
    else:
        if address:
            require_loopback(address, "the coordinator runs without TLS")
        return MetricsServer(figures, admit_loopback)
    await server.open(address)
    return server

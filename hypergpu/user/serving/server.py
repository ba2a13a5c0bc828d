"""The server of the API: this machine alone over plain HTTP, or anybody over TLS."""

import asyncio
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from ipaddress import ip_address
from pathlib import Path
from typing import NamedTuple

import uvicorn

from hypergpu.errors import HyperGPUError, Reason
from hypergpu.process import require_descriptors
from hypergpu.user.client import AsyncCoordinator, ConnectionTarget
from hypergpu.user.client.settings import config_folder
from hypergpu.user.serving.api import OpenAiApi
from hypergpu.user.serving.api_keys import ApiKeys
from hypergpu.user.serving.batch_store import BatchStore
from hypergpu.user.serving.certificate_renewal import ApiCertificateFiles, CertificateRequest

KEY_FILE = "api-keys.sqlite"
BATCH_FOLDER = "api-batches"
PORT = 8077
_CONNECTIONS_MOST = 1_024
_OWN_DESCRIPTORS = 128
"""Files and sockets that the API has open beside its callers' connections, at most."""
_SHUTDOWN_S = 2


class ApiPlace(NamedTuple):
    """Where the API listens."""

    host: str = "127.0.0.1"
    port: int = PORT
    """0: any that is free."""
    certificate: Path | None = None
    """PEM file; without one only this machine may call."""
    private_key: Path | None = None
    authority: Path | None = None
    """PEM file of the CA that callers trust; None: the certificate itself."""
    called_host: str = ""
    """What callers dial; empty: where it listens."""
    renewal: CertificateRequest | None = None
    """By which the hub's CA renews the certificate; None: its operator does."""

    @property
    def needs_certificate(self) -> bool:
        """Whether others are to call it, and it has none."""
        return self.certificate is None and not _is_loopback(self.host)

    def check_pair(self) -> None:
        """Refuse half of a certificate.

        Raises:
            HyperGPUError: ARGUMENT_INVALID.
        """
        if (self.certificate is None) != (self.private_key is None):
            detail = "TLS takes a certificate and its private key"
            raise HyperGPUError(
                Reason.ARGUMENT_INVALID, detail, fix="give --tls-certificate and --tls-key"
            )

    def check(self) -> None:
        """Refuse plain HTTP that others could read.

        Raises:
            HyperGPUError: ARGUMENT_INVALID.
        """
        self.check_pair()
        if self.needs_certificate:
            detail = f"plain HTTP at {self.host} would show prompts and keys to its network"
            fix = "give --tls-certificate and --tls-key, or leave --listen out"
            raise HyperGPUError(Reason.ARGUMENT_INVALID, detail, fix=fix)

    def base_url(self, port: int) -> str:
        """What tools are told as their base URL."""
        scheme = "http" if self.certificate is None else "https"
        called_host = self.called_host or self.host
        host = f"[{called_host}]" if ":" in called_host else called_host
        return f"{scheme}://{host}:{port}/v1"


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def open_keys() -> ApiKeys:
    """The keys of this user on this machine."""
    return ApiKeys(config_folder() / KEY_FILE)


def bound_socket(place: ApiPlace) -> socket.socket:
    """A socket at the place, so that its port is known before anything is served.

    Raises:
        HyperGPUError: ADDRESS_UNUSABLE, the port is taken or the address is not this machine's.
    """
    place.check()
    family = socket.AF_INET6 if ":" in place.host else socket.AF_INET
    # asyncio sends small writes at once for sockets alone that name their protocol.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((place.host, place.port))
    except OSError as error:
        listener.close()
        detail = f"{place.host}:{place.port}: {error.strerror}"
        raise HyperGPUError(
            Reason.ADDRESS_UNUSABLE, detail, fix="give another port: --port, or 0 for a free one"
        ) from error
    return listener


async def serve_api(
    target: ConnectionTarget,
    place: ApiPlace,
    listener: socket.socket,
    keys: ApiKeys,
    tell_ready: Callable[[], None] = lambda: None,
    tell: Callable[[str], None] = lambda _: None,
) -> None:
    """Serve until SIGINT or SIGTERM.

    Raises:
        HyperGPUError: LIMIT_REACHED, the system does not let it open as many connections.

    Args:
        target: The coordinator, and as whom its models are called.
        place: Where.
        listener: Bound to it.
        keys: Who may call.
        tell_ready: Called once it serves.
        tell: Tells people what fails meanwhile.
    """
    require_descriptors(_CONNECTIONS_MOST + _OWN_DESCRIPTORS)
    store = BatchStore(config_folder() / BATCH_FOLDER)
    async with await AsyncCoordinator.open(target) as coordinator:
        config = uvicorn.Config(
            OpenAiApi(coordinator, keys, store).app(),
            log_config=None,
            access_log=False,
            server_header=False,
            limit_concurrency=_CONNECTIONS_MOST,
            timeout_graceful_shutdown=_SHUTDOWN_S,
            ssl_certfile=place.certificate,
            ssl_keyfile=place.private_key,
        )
        config.load()
        renewal_task = asyncio.create_task(_keep_certificate(config, place, coordinator, tell))
        try:
            await _ApiServer(config, tell_ready).serve([listener])
        finally:
            renewal_task.cancel()
            await asyncio.gather(renewal_task, return_exceptions=True)


async def _keep_certificate(
    config: uvicorn.Config,
    place: ApiPlace,
    coordinator: AsyncCoordinator,
    tell: Callable[[str], None],
) -> None:
    """Have the API present a good certificate, where it presents one."""
    if config.ssl is not None and place.certificate is not None and place.private_key is not None:
        files = ApiCertificateFiles(place.certificate, place.private_key, place.renewal, tell)
        await files.keep_good(config.ssl, coordinator)


class _ApiServer(uvicorn.Server):
    """Says that it serves, and ends without dying of the signal."""

    def __init__(self, config: uvicorn.Config, tell_ready: Callable[[], None]) -> None:
        super().__init__(config)
        self._tell_ready = tell_ready

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """See `uvicorn.Server`."""
        loop, signals = asyncio.get_running_loop(), (signal.SIGINT, signal.SIGTERM)
        for number in signals:
            loop.add_signal_handler(number, self.handle_exit, number, None)
        try:
            yield
        finally:
            for number in signals:
                loop.remove_signal_handler(number)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """See `uvicorn.Server`."""
        await super().startup(sockets)
        if self.started:
            self._tell_ready()

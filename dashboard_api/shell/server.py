"""The server: one port with page, feed, API and metrics."""

import asyncio
import gc
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager

import msgspec
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import BaseRoute, Route, WebSocketRoute
from starlette.types import ASGIApp
from starlette.websockets import WebSocket

from dashboard_api.config import DashboardSettings
from dashboard_api.core.sessions import CodeBook, known_hosts, known_origins
from dashboard_api.shell.answer_routes import ANSWER_ENDPOINTS
from dashboard_api.shell.api import Endpoint, endpoint_function
from dashboard_api.shell.control_routes import CONTROL_ENDPOINTS
from dashboard_api.shell.failures import json_response
from dashboard_api.shell.feed_socket import FeedProtocol, serve_feed
from dashboard_api.shell.guard import Guard
from dashboard_api.shell.history import HistoryStore, history_url
from dashboard_api.shell.history_routes import HISTORY_ENDPOINTS
from dashboard_api.shell.item_routes import ITEM_ENDPOINTS
from dashboard_api.shell.metrics import CONTENT_TYPE, metrics_text
from dashboard_api.shell.openapi import PREFIX, openapi_document
from dashboard_api.shell.page import asset_routes, page_response
from dashboard_api.shell.recorder import HistoryRecorder
from dashboard_api.shell.recording import Recording
from dashboard_api.shell.serve_routes import SERVE_ENDPOINTS
from dashboard_api.shell.services import DashboardServices
from dashboard_api.shell.session_routes import SESSION_ENDPOINTS, fresh_link
from dashboard_api.shell.session_store import SessionStore
from dashboard_api.shell.token_checks import TellRole, TokenChecks
from dashboard_api.shell.upload_routes import UPLOAD_ENDPOINTS
from dashboard_api.shell.uploads import Uploads
from dashboard_api.shell.views import Views
from dashboard_api.shell.webhooks import AlertSender, checked_webhooks
from hypergpu.errors import HyperGPUError, Reason
from hypergpu.user.client import ConnectionTarget

ENDPOINTS: tuple[Endpoint, ...] = (
    *SESSION_ENDPOINTS,
    *HISTORY_ENDPOINTS,
    *ITEM_ENDPOINTS,
    *ANSWER_ENDPOINTS,
    *SERVE_ENDPOINTS,
    *CONTROL_ENDPOINTS,
    *UPLOAD_ENDPOINTS,
)
LOOPBACK_NAMES = ("127.0.0.1", "localhost", "[::1]")
MESSAGE_BYTES_MAX = 4096
SHUTDOWN_WITHIN_S = 2
PING_S = 20.0
SWITCH_INTERVAL_S = 0.001
"""Turn of a thread that writes the history while the loop waits; Python's own is 5 ms."""


class DashboardReady(msgspec.Struct, frozen=True):
    """The line that the dashboard prints once it serves."""

    address: str
    link: str
    """With a one-time code that is good for ten minutes."""


def open_services(
    settings: DashboardSettings,
    target: ConnectionTarget,
    port: int,
    tell_role: TellRole | None = None,
) -> DashboardServices:
    """Everything that answers share; starts nothing.

    Args:
        settings: Of this server.
        target: The coordinator that it shows, and as whom.
        port: The port that is listened at.
        tell_role: Asked for the role of a token; None: the coordinator is.
    """
    checked_webhooks(settings.webhook)
    history = HistoryStore(history_url(settings.database_url, settings.data_dir))
    recorder = HistoryRecorder(history)
    checks = TokenChecks(target, tell_role)
    return DashboardServices(
        settings=settings,
        target=target,
        history=history,
        recorder=recorder,
        sessions=SessionStore(history.engine),
        codes=CodeBook(),
        uploads=Uploads(settings.data_dir / "uploads", settings.upload_bytes),
        views=Views(target, recorder, settings.coordinator_data_dir, checks),
        checks=checks,
        port=port,
        recording=Recording.read(settings.recording) if settings.recording else None,
    )


def build_app(services: DashboardServices) -> ASGIApp:
    """The whole server as one application behind its guard."""

    @asynccontextmanager
    async def lifespan(_app: Starlette) -> AsyncIterator[None]:
        async with running(services):
            yield

    async def page(_request: Request) -> Response:
        return page_response(services.page_folder)

    async def feed(socket: WebSocket) -> None:
        await serve_feed(services, socket)

    async def document(_request: Request) -> Response:
        return json_response(openapi_document(ENDPOINTS))

    routes: list[BaseRoute] = [
        Route("/", page),
        WebSocketRoute("/feed", feed),
        Route(f"{PREFIX}/openapi.json", document),
        *(
            Route(f"{PREFIX}{each.path}", endpoint_function(each, services), methods=[each.method])
            for each in ENDPOINTS
        ),
        *_operational_routes(services),
        *asset_routes(services.page_folder),
    ]
    hosts = known_hosts((*LOOPBACK_NAMES, *services.settings.host), services.port)
    return Guard(Starlette(routes=routes, lifespan=lifespan), hosts, known_origins(hosts))


def _operational_routes(services: DashboardServices) -> list[BaseRoute]:
    async def healthz(_request: Request) -> Response:
        return PlainTextResponse("the server runs\n")

    async def readyz(_request: Request) -> Response:
        if services.recording is not None:
            return PlainTextResponse("a recording is shown\n")
        coordinator = services.views.own.projection.state["coordinator"]
        if coordinator["is_reachable"]:
            return PlainTextResponse("the coordinator answers\n")
        return PlainTextResponse(f"{coordinator['reason']}\n", 503)

    async def metrics(_request: Request) -> Response:
        content = b"" if services.recording is not None else metrics_text(services)
        return Response(content, media_type=CONTENT_TYPE)

    return [Route("/healthz", healthz), Route("/readyz", readyz), Route("/metrics", metrics)]


@asynccontextmanager
async def running(services: DashboardServices) -> AsyncIterator[None]:
    """Follow the coordinator while the block runs."""
    if services.recording is not None:
        yield
        services.history.close()
        return
    own = services.views.start()
    sender = AlertSender(own.feed, services.settings.webhook)
    tasks = [asyncio.create_task(each.run()) for each in (services.recorder, sender)]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await services.views.close()
        await services.checks.close()
        await asyncio.gather(*tasks, return_exceptions=True)
        await services.recorder.flush()
        services.history.close()


def listening_socket(settings: DashboardSettings) -> socket.socket:
    """Bind the port.

    Raises:
        HyperGPUError: ADDRESS_UNUSABLE.
    """
    ports = [settings.port, 0] if settings.takes_any_port else [settings.port]
    family = socket.AF_INET6 if ":" in settings.listen else socket.AF_INET
    problem = ""
    for port in ports:
        # asyncio sends small writes at once for sockets alone that name their protocol.
        bound = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            bound.bind((settings.listen, port))
        except OSError as error:
            bound.close()
            problem = error.strerror or str(error)
        else:
            return bound
    detail = f"the page cannot listen at {settings.listen}:{settings.port}: {problem}"
    raise HyperGPUError(Reason.ADDRESS_UNUSABLE, detail, fix="choose another: --port PORT")


def uvicorn_config(app: ASGIApp) -> uvicorn.Config:
    """How connections are served."""
    return uvicorn.Config(
        app,
        ws=FeedProtocol,
        ws_max_size=MESSAGE_BYTES_MAX,
        ws_ping_interval=PING_S,
        ws_ping_timeout=PING_S,
        ws_per_message_deflate=False,
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_graceful_shutdown=SHUTDOWN_WITHIN_S,
    )


class PageServer(uvicorn.Server):
    """Says where it is once it serves."""

    def __init__(
        self,
        config: uvicorn.Config,
        services: DashboardServices,
        say_ready: Callable[[DashboardReady], None],
    ) -> None:
        super().__init__(config)
        self._services = services
        self._say_ready = say_ready

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """End without dying of the signal: the exit status says that all was well."""
        loop, signals = asyncio.get_running_loop(), (signal.SIGINT, signal.SIGTERM)
        for number in signals:
            loop.add_signal_handler(number, self.handle_exit, number, None)
        try:
            yield
        finally:
            for number in signals:
                loop.remove_signal_handler(number)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        address = f"{self._services.settings.listen}:{self._services.port}"
        link = fresh_link(self._services)
        if self._services.recording is not None:
            link = link.partition("#")[0]
        self._say_ready(DashboardReady(address, link))


def print_ready_line(ready: DashboardReady) -> None:
    """Tell the program that started this one."""
    sys.stdout.write(msgspec.json.encode(ready).decode() + "\n")
    sys.stdout.flush()


def shorten_pauses() -> None:
    """Keep pauses of the event loop short, in this whole process.

    A full collection of garbage would look through all modules again each time: 90 ms.
    """
    gc.collect()
    gc.freeze()
    sys.setswitchinterval(SWITCH_INTERVAL_S)


async def serve(
    settings: DashboardSettings,
    target: ConnectionTarget,
    say_ready: Callable[[DashboardReady], None] = print_ready_line,
) -> None:
    """Serve until told to end."""
    bound = listening_socket(settings)
    services = open_services(settings, target, bound.getsockname()[1])
    server = PageServer(uvicorn_config(build_app(services)), services, say_ready)
    shorten_pauses()
    await server.serve([bound])

"""The page's server in this process, in front of a scripted coordinator."""

import asyncio
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import NamedTuple

import uvicorn

from benchmarks.ours.page.scripted import ScriptedCoordinator, scripted_coordinator
from dashboard_api.config import DashboardSettings
from dashboard_api.shell.server import (
    build_app,
    listening_socket,
    open_services,
    shorten_pauses,
    uvicorn_config,
)
from dashboard_api.shell.services import DashboardServices
from dashboard_api.shell.session_routes import fresh_link
from hypergpu.ids import Digest, TokenId
from hypergpu.user.client import ConnectionTarget
from hypergpu.wire.credentials import Role, Token

CALL_TIMEOUT_S = 30.0


class ServedPage(NamedTuple):
    """A server that runs."""

    services: DashboardServices
    coordinator: ScriptedCoordinator
    token: Token

    @property
    def feed(self) -> str:
        """Address of the feed."""
        return f"ws://127.0.0.1:{self.services.port}/feed"

    @property
    def origin(self) -> str:
        """Address of the page."""
        return f"http://127.0.0.1:{self.services.port}/"

    def link(self) -> str:
        """Address of the page with a one-time code."""
        return fresh_link(self.services)


@asynccontextmanager
async def served_page(nodes: int, round_s: float) -> AsyncIterator[ServedPage]:
    """A server that follows a job of so many nodes; it has its first state."""
    with (
        tempfile.TemporaryDirectory() as folder,
        scripted_coordinator(nodes, round_s) as coordinator,
    ):
        settings = DashboardSettings(data_dir=Path(folder), port=0)
        bound = listening_socket(settings)
        token = Token(
            (coordinator.address,), Digest(""), Role.OPERATOR, TokenId("0123456789ab"), "s" * 22
        )
        target = ConnectionTarget(coordinator.address, token, CALL_TIMEOUT_S)
        services = open_services(settings, target, bound.getsockname()[1])
        server = uvicorn.Server(uvicorn_config(build_app(services)))
        shorten_pauses()
        task = asyncio.create_task(server.serve([bound]))
        while not server.started:  # noqa: ASYNC110 - uvicorn has no event for it
            await asyncio.sleep(0.01)
        await services.views.own.has_answered.wait()
        try:
            yield ServedPage(services, coordinator, token)
        finally:
            server.should_exit = True
            await task

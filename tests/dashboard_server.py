"""A dashboard's server in this process. Its coordinator is away: tests tell its feed themselves."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import websockets

from dashboard_api.config import DashboardSettings
from dashboard_api.shell.feed import Feed
from dashboard_api.shell.server import (
    PageServer,
    build_app,
    listening_socket,
    open_services,
    uvicorn_config,
)
from dashboard_api.shell.services import DashboardServices
from dashboard_api.shell.session_routes import fresh_link
from hypergpu.errors import HyperGPUError, Reason
from hypergpu.ids import Digest, TokenId
from hypergpu.user.client import ConnectionTarget
from hypergpu.wire.credentials import Role, Token, token_text
from hypergpu.wire.free_ports import free_ports


def token_of(role: Role, address: str) -> Token:
    """A token of a coordinator without TLS, which `dashboard`'s own knows, an id for each role."""
    token_id = TokenId(f"{list(Role).index(role):x}123456789ab")
    return Token((address,), Digest(""), role, token_id, "s" * 22)


async def tell_role(token: Token) -> str:
    """Answer for the coordinator that is away: of the tokens of `token_of`, and no others."""
    for role in Role:
        known_token = token_of(role, token.addresses[0])
        if (known_token.id, known_token.secret) == (token.id, token.secret):
            return role.value
    raise HyperGPUError(Reason.TOKEN_INVALID, "the token's id or secret is wrong")


class DashboardUnderTest(NamedTuple):
    """A server that runs."""

    services: DashboardServices
    origin: str

    @property
    def feed(self) -> Feed:
        """The server's own feed."""
        return self.services.views.own.feed

    @property
    def bearer(self) -> dict[str, str]:
        """Headers of a program with the server's own token."""
        return {"authorization": f"Bearer {token_text(self.services.target.token)}"}

    def code(self) -> str:
        """A fresh one-time code."""
        return fresh_link(self.services).partition("#code=")[2]

    def client(self, **headers: str) -> httpx.AsyncClient:
        """A browser that knows nothing yet."""
        return httpx.AsyncClient(base_url=self.origin, headers=headers, trust_env=False)

    def open_feed(self, query: str = "", **more: Any) -> Any:
        """A connection to the feed, as a program with a token."""
        address = f"{self.origin.replace('http', 'ws', 1)}/feed{query}"
        arguments = {"additional_headers": self.bearer, "max_size": None, "proxy": None, **more}
        return websockets.connect(address, **arguments)


@contextlib.asynccontextmanager
async def dashboard(folder: Path, **settings: Any) -> AsyncIterator[DashboardUnderTest]:
    """A server while the block runs."""
    page_settings = DashboardSettings(data_dir=folder / "dashboard", port=0, **settings)
    bound = listening_socket(page_settings)
    port = bound.getsockname()[1]
    address = f"127.0.0.1:{free_ports(1)[0]}"
    target = ConnectionTarget(address, token_of(Role.OPERATOR, address), 5.0)
    services = open_services(page_settings, target, port, tell_role)
    start_event = asyncio.Event()
    server = PageServer(uvicorn_config(build_app(services)), services, lambda _: start_event.set())
    serve_task = asyncio.create_task(server.serve([bound]))
    start_task = asyncio.create_task(start_event.wait())
    await asyncio.wait((serve_task, start_task), return_when=asyncio.FIRST_COMPLETED)
    assert start_event.is_set(), serve_task.result()
    if services.recording is None:
        services.views.own.has_answered.set()
    try:
        yield DashboardUnderTest(services, f"http://127.0.0.1:{port}")
    finally:
        server.should_exit = True
        await serve_task

"""Buckets on a server of this machine, and a server that does not do as it should."""

import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import aiohttp
from aiohttp import web
from yarl import URL

from coordinator.shell.store.bulk.bucket import S3Bucket
from hypergpu.user.cluster.s3_server import BUCKET, S3Server

_BODY_BYTES_MAX = 64 << 20
Fault = Callable[[web.Request], Awaitable[web.StreamResponse | None]]
"""Answers in place of the server; None: the server answers."""


def bucket_of(server: S3Server, *, url: str = "", prefix: str = "") -> S3Bucket:
    """A bucket on the server, or on one at another address that passes requests on.

    Args:
        server: A server.
        url: Address of the other one.
        prefix: Names a part of the bucket; empty: a part of its own.
    """
    return S3Bucket(
        f"s3://{BUCKET}/{prefix or secrets.token_hex(8)}",
        "coordinator",
        endpoint_url=url or server.url,
        aws_access_key_id=server.environment["AWS_ACCESS_KEY_ID"],
        aws_secret_access_key=server.environment["AWS_SECRET_ACCESS_KEY"],
        region_name="us-east-1",
    )


class FaultyServer:
    """Passes requests on to a server, except where a fault answers them."""

    def __init__(self, server: S3Server) -> None:
        self._server = server
        self.url = ""
        self.fault: Fault | None = None
        self.asked: list[str] = []
        """Method and path of each request."""

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        """Serve on a free port of loopback."""
        app = web.Application(client_max_size=_BODY_BYTES_MAX)
        app.router.add_route("*", "/{path:.*}", self._handle)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        host, port = runner.addresses[0][:2]
        self.url = f"http://{host}:{port}"
        try:
            yield
        finally:
            await runner.cleanup()

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        self.asked.append(f"{request.method} {request.path}")
        answer = await self.fault(request) if self.fault else None
        return answer or await self.passed_on(request)

    async def passed_on(self, request: web.Request) -> web.Response:
        """The server's own answer."""
        url = URL(self._server.url + request.raw_path, encoded=True)
        async with (
            aiohttp.ClientSession(auto_decompress=False) as session,
            session.request(
                request.method, url, headers=request.headers, data=await request.read()
            ) as answer,
        ):
            kept_headers = {
                name: value
                for name, value in answer.headers.items()
                if name.lower() not in {"connection", "content-length", "transfer-encoding"}
            }
            content = await answer.read()
        if request.method == "HEAD":
            kept_headers["Content-Length"] = answer.headers.get("Content-Length", "0")
        return web.Response(status=answer.status, body=content or None, headers=kept_headers)

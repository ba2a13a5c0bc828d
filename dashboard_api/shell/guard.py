"""Refuses requests of other sites before anything of them is read, and dresses every answer."""

from collections.abc import Sequence

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from dashboard_api.core.sessions import AccessRequest, access_refusal
from dashboard_api.shell.failures import RequestRefusedError, failure_response

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data:"
    " blob:; font-src 'self'; connect-src 'self'; form-action 'none'; base-uri 'none';"
    " frame-ancestors 'none'; manifest-src 'self'"
)
HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), microphone=(), geolocation=()",
}
HEADER_BYTES_MAX = 16_384
CLOSED_BY_POLICY = 1008


class Guard:
    """Middleware around the whole server."""

    def __init__(self, app: ASGIApp, hosts: Sequence[str], origins: Sequence[str]) -> None:
        self._app = app
        self.hosts, self.origins = hosts, origins

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on what is allowed."""
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        if refusal := self._refusal(scope):
            await _refuse(refusal, scope, receive, send)
            return

        async def send_dressed(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        await self._app(scope, receive, send_dressed)

    def _refusal(self, scope: Scope) -> str:
        if sum(len(name) + len(value) for name, value in scope["headers"]) > HEADER_BYTES_MAX:
            return "the request's headers are too large"
        headers = Headers(scope=scope)
        request = AccessRequest(
            method=scope.get("method", "GET"),
            host=headers.get("host", "").lower(),
            origin=headers.get("origin", "").lower(),
            is_upgrade=scope["type"] == "websocket",
            has_bearer=headers.get("authorization", "").startswith("Bearer "),
        )
        return access_refusal(request, self.hosts, self.origins)


async def _refuse(refusal: str, scope: Scope, receive: Receive, send: Send) -> None:
    if scope["type"] == "websocket":
        await receive()
        await send({"type": "websocket.close", "code": CLOSED_BY_POLICY, "reason": refusal})
        return
    fix = "open the page by the link that was printed, or name the host: --host NAME"
    response = failure_response(RequestRefusedError(403, refusal, fix))
    await response(scope, receive, send)

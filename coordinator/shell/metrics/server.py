"""The port with `/metrics`: to everybody on loopback, else by TLS to whoever shows an operator's
token.
"""

import ssl
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

import structlog

from coordinator.shell.nodes.identity.tokens import IssuedTokens
from coordinator.shell.rate import GuessLimiter
from hypergpu.clock import unix_s
from hypergpu.errors import HyperGPUError, Reason
from hypergpu.wire.authority import is_loopback
from hypergpu.wire.credentials import Credential, Role, parse_token

if TYPE_CHECKING:
    from aiohttp import web

log = structlog.get_logger()

_OPERATORS = frozenset({Role.OPERATOR})
_LOOPBACK_NAMES = frozenset({"127.0.0.1", "localhost", "[::1]"})
_CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_HEADER_BYTES_MAX = 8_192
_PORT_MAX = 65_535


class OperatorCheck:
    """Admits whoever shows an operator's token: ``Authorization: Bearer hgpu1...``."""

    def __init__(self, tokens: IssuedTokens, guesses: GuessLimiter) -> None:
        self._tokens = tokens
        self._guesses = guesses

    def __call__(self, request: "web.BaseRequest") -> None:
        """Judge a request.

        Raises:
            HyperGPUError: TOKEN_INVALID, TOKEN_REVOKED, TOKEN_EXPIRED, TOKEN_USED_UP,
                ROLE_FORBIDDEN or RATE_LIMITED.
        """
        scheme, _, text = request.headers.get("Authorization", "").partition(" ")
        if scheme.lower() != "bearer":
            fix = "send an operator's token: Authorization: Bearer hgpu1..."
            raise HyperGPUError(Reason.TOKEN_INVALID, "no token was shown", fix=fix)
        token = parse_token(text.strip())
        credential = Credential(token.id, token.secret)
        with self._guesses.count_failures({Reason.TOKEN_INVALID: token.id}):
            self._tokens.check(credential, _OPERATORS, unix_s())


def admit_loopback(request: "web.BaseRequest") -> None:
    """Admit whoever dialled this machine by a name of its own: a page of somebody else's, whose
    name was made to lead here, did not.

    Raises:
        HyperGPUError: REQUEST_INVALID.
    """
    host = request.host.rpartition(":")[0] if ":" in request.host else request.host
    if host not in _LOOPBACK_NAMES:
        detail = f"the request is for {request.host[:80]!r}, which is no name of this machine"
        raise HyperGPUError(Reason.REQUEST_INVALID, detail, fix="ask for 127.0.0.1")


class MetricsServer:
    """One port.

    Args:
        tell: Makes the text.
        admit: Raises `HyperGPUError` for a request that is not to be answered.
        context: Of TLS; None: there is none.
    """

    def __init__(
        self,
        tell: Callable[[], Awaitable[bytes]],
        admit: "Callable[[web.BaseRequest], None]",
        context: ssl.SSLContext | None = None,
    ) -> None:
        self._tell = tell
        self._admit = admit
        self._context = context
        self._runner: web.ServerRunner | None = None
        self.port = 0
        """0 before `open`."""

    async def open(self, address: str) -> None:
        """Take the port of an address, HOST:PORT, and answer.

        Raises:
            HyperGPUError: ADDRESS_UNUSABLE.
        """
        from aiohttp import web  # A start without metrics is a tenth of a second quicker.

        host, port = metrics_address(address)
        server = web.Server(self._answer, max_headers=64, max_field_size=_HEADER_BYTES_MAX)
        self._runner = web.ServerRunner(server)
        await self._runner.setup()
        site = web.TCPSite(self._runner, host, port, ssl_context=self._context)
        try:
            await site.start()
        except OSError as error:
            await self.close()
            detail = f"{address} cannot be bound for metrics: {error.strerror or error}"
            raise HyperGPUError(Reason.ADDRESS_UNUSABLE, detail) from error
        self.port = int(self._runner.addresses[0][1])
        log.info("metrics are served", host=host, port=self.port)

    async def close(self) -> None:
        """Let go of the port."""
        if self._runner is not None:
            await self._runner.cleanup()

    async def _answer(self, request: "web.BaseRequest") -> "web.Response":
        from aiohttp import web

        if request.path != "/metrics":
            return web.Response(status=404, text="there is /metrics alone\n")
        if request.method != "GET":
            return web.Response(status=405, headers={"Allow": "GET"})
        try:
            self._admit(request)
        except HyperGPUError as error:
            return web.Response(status=_STATUS.get(error.reason, 401), text=f"{error}\n")
        text = await self._tell()
        return web.Response(body=text, headers={"Content-Type": _CONTENT_TYPE})


_STATUS = {
    Reason.ROLE_FORBIDDEN: 403,
    Reason.RATE_LIMITED: 429,
    Reason.REQUEST_INVALID: 400,
}


def metrics_address(address: str) -> tuple[str, int]:
    """Host and port of a setting; port 0 takes a free one.

    Raises:
        HyperGPUError: ADDRESS_UNUSABLE, it is not HOST:PORT.
    """
    host, _, port = address.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not host or not port.isdecimal() or int(port) > _PORT_MAX:
        detail = f"metrics_listen is {address!r}, which is no HOST:PORT"
        raise HyperGPUError(Reason.ADDRESS_UNUSABLE, detail, fix="such as 127.0.0.1:9464")
    return host, int(port)


def require_loopback(address: str, why: str) -> None:
    """Refuse an address that other machines can dial.

    Raises:
        HyperGPUError: ADDRESS_UNUSABLE.
    """
    host, _ = metrics_address(address)
    if not is_loopback(host):
        detail = f"metrics are served on loopback only, not on {address}: {why}"
        fix = "use 127.0.0.1 with a port, and a tunnel or a scraper on this machine"
        raise HyperGPUError(Reason.ADDRESS_UNUSABLE, detail, fix=fix)

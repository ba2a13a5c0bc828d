"""How requests are read: bounded, typed, and with a session. Every endpoint is one row of a table,
from which routes and the OpenAPI document are made.
"""

from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple, TypeVar

import msgspec
from starlette.concurrency import run_in_threadpool
from starlette.requests import HTTPConnection, Request
from starlette.responses import Response

from dashboard_api.shell.failures import RequestRefusedError, failure_response
from dashboard_api.shell.services import DashboardServices
from dashboard_api.shell.session_store import Session, user_token
from hypergpu.clock import unix_ms
from hypergpu.errors import Reason
from hypergpu.user.client import HyperGPUError, RemoteFailureError

BODY_BYTES_MAX = 1 << 20
ID_LENGTH_MAX = 64
OPEN_LINK = "open the link that the dashboard printed, or paste a token"
_Body = TypeVar("_Body")


class Parameter(NamedTuple):
    """A parameter in the query."""

    name: str
    meaning: str
    kind: str = "string"
    """``string`` or ``integer``."""
    minimum: int = 0
    maximum: int = 2**53
    default: str = ""


class Call(NamedTuple):
    """A request that may be answered."""

    services: DashboardServices
    request: Request
    session: Session | None

    @property
    def who(self) -> Session:
        """The session of an endpoint that needs one."""
        if self.session is None:
            raise HyperGPUError(Reason.TOKEN_INVALID, "there is no session", fix=OPEN_LINK)
        return self.session

    def path(self, name: str) -> str:
        """A part of the path."""
        value = str(self.request.path_params[name])
        if len(value) > ID_LENGTH_MAX:
            raise RequestRefusedError(400, f"{name} is too long", "take an id from a list")
        return value

    def text(self, name: str, default: str = "", *, most: int = 200) -> str:
        """A text from the query."""
        value = self.request.query_params.get(name, default)
        if len(value) > most or "\x00" in value:
            raise RequestRefusedError(
                400, f"{name} is no text of at most {most} characters", "shorten it"
            )
        return value

    def whole(self, name: str, default: int, *, most: int = 2**53) -> int:
        """A number from the query, at least 0."""
        text = self.request.query_params.get(name)
        if text is None or text == "":
            return default
        if not (text.isascii() and text.isdecimal() and len(text) <= 16) or int(text) > most:
            message = f"{name} is no whole number from 0 to {most}"
            raise RequestRefusedError(400, message, "correct the number")
        return int(text)

    async def body(self, kind: type[_Body]) -> _Body:
        """The JSON body."""
        raw = await read_body(self.request, BODY_BYTES_MAX)
        try:
            return msgspec.json.decode(raw, type=kind)
        except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as wrong:
            message = f"the body is not as expected: {wrong}"
            raise RequestRefusedError(400, message, "see /api/v1/openapi.json") from wrong


Responder = Callable[[Call], Awaitable[Response]]


class Endpoint(NamedTuple):
    """A row of the API."""

    method: str
    path: str
    answer: Responder
    meaning: str
    parameters: tuple[Parameter, ...] = ()
    body: Any = None
    """Type of the JSON body; None: there is none."""
    result: Any = None
    """Type of the JSON answer; None: any object."""
    is_open: bool = False
    """Whether it is answered without a session."""
    for_node_owners: bool = False
    """Whether it is answered to a node's token, which sees and steers its own nodes only."""
    media_type: str = "application/json"
    """Media type of the answer."""


async def read_body(request: Request, most: int) -> bytes:
    """A body of at most so many bytes.

    Raises:
        RequestRefusedError: It is longer.
    """
    parts, size = [], 0
    async for part in request.stream():
        size += len(part)
        if size > most:
            raise RequestRefusedError(413, f"the body is over {most} bytes", "send less at once")
        parts.append(part)
    return b"".join(parts)


def endpoint_function(
    endpoint: Endpoint, services: DashboardServices
) -> Callable[[Request], Awaitable[Response]]:
    """The function that Starlette calls for a row."""

    async def answer(request: Request) -> Response:
        try:
            call = Call(services, request, await _session_of(endpoint, services, request))
            if not endpoint.is_open:
                _require_role(endpoint, call.who)
            if request.method == "GET":
                return await endpoint.answer(call)
            return await _answer_with_audit(endpoint, call)
        except (HyperGPUError, RemoteFailureError, RequestRefusedError) as failure:
            return failure_response(failure)

    return answer


async def _session_of(
    endpoint: Endpoint, services: DashboardServices, request: Request
) -> Session | None:
    """Session of a request. One that opens or ends a session is answered without one, too: whose
    token was revoked leaves, or comes back with another.
    """
    try:
        return await find_session(services, request)
    except (HyperGPUError, RemoteFailureError):
        if endpoint.is_open and request.method != "GET":
            return None
        raise


def _require_role(endpoint: Endpoint, session: Session) -> None:
    """Refuse a node's owner what is not about the owner's nodes; else the coordinator decides.

    Raises:
        HyperGPUError: ROLE_FORBIDDEN.
    """
    if session.is_node_owner and not endpoint.for_node_owners:
        detail = f"{endpoint.method} {endpoint.path} is not for a node's token"
        fix = "a node's token sees and steers the nodes that joined with it; paste a user's token"
        raise HyperGPUError(Reason.ROLE_FORBIDDEN, detail, fix=fix)


async def _answer_with_audit(endpoint: Endpoint, call: Call) -> Response:
    """Answer, and write the action down with its outcome."""
    subjects = ", ".join(str(each) for each in call.request.path_params.values())
    action = f"{endpoint.meaning.rstrip('.')}{subjects and f' ({subjects})'}"[:200]
    outcome = "done"
    try:
        return await endpoint.answer(call)
    except (HyperGPUError, RemoteFailureError, RequestRefusedError) as failure:
        outcome = str(failure)[:500]
        raise
    finally:
        await call.services.note_action(call.session, action, outcome)


async def find_session(services: DashboardServices, connection: HTTPConnection) -> Session | None:
    """Session of the cookie or bearer token that a request carries; None: it carries neither.

    Raises:
        HyperGPUError: The coordinator does not take the token, or is away and never has.
    """
    if services.recording is not None:
        return None
    scheme, _, text = connection.headers.get("authorization", "").partition(" ")
    if scheme == "Bearer":
        token = user_token(text, services.target.token)
        return Session(token, await services.checks.role(token), unix_ms())
    cookie = connection.cookies.get(services.cookie_name, "")
    if not cookie:
        return None
    stored_session = await run_in_threadpool(services.sessions.find_session, cookie, unix_ms())
    if stored_session is None:
        return None
    return Session(
        stored_session.token,
        await services.checks.role(stored_session.token),
        stored_session.ends_at_ms,
    )

"""Sessions: one-time codes and pasted tokens for a cookie."""

import secrets

import msgspec
from starlette.concurrency import run_in_threadpool
from starlette.responses import Response

from dashboard_api.core.sessions import SESSION_GOOD_MS
from dashboard_api.shell.api import Call, Endpoint
from dashboard_api.shell.failures import json_response
from dashboard_api.shell.services import DashboardServices
from dashboard_api.shell.session_store import Session, user_token
from hypergpu.clock import monotonic_ms, unix_ms
from hypergpu.errors import HyperGPUError, Reason


class SessionRequest(msgspec.Struct, forbid_unknown_fields=True):
    """The code of a link, or a token."""

    code: str = ""
    token: str = ""


class WhoAmI(msgspec.Struct):
    """Who the session is."""

    role: str
    name: str
    """Id of the token, without its secret."""
    address: str
    ends_at_ms: int
    node: str | None = None
    """The node that the token owns; None: none is known."""
    recorded: bool = False


class LinkAnswer(msgspec.Struct):
    """A fresh link."""

    link: str


async def open_session(call: Call) -> Response:
    """Exchange a code or a token for a cookie."""
    request, services = await call.body(SessionRequest), call.services
    if request.token:
        token = user_token(request.token, services.target.token)
        role = await services.checks.role(token)
    else:
        if refusal := services.codes.redeem(request.code, monotonic_ms()):
            fix = "take a fresh link: hypergpu dashboard --link"
            raise HyperGPUError(Reason.TOKEN_USED_UP, refusal, fix=fix)
        token = services.target.token
        role = token.role
    cookie, stored_session = await run_in_threadpool(
        services.sessions.open_session, token, unix_ms()
    )
    session = Session(token, role, stored_session.ends_at_ms)
    answer = json_response(who(services, session))
    answer.set_cookie(
        services.cookie_name,
        cookie,
        max_age=SESSION_GOOD_MS // 1000,
        httponly=True,
        samesite="strict",
        secure=call.request.url.scheme == "https",
    )
    return answer


def who(services: DashboardServices, session: Session) -> WhoAmI:
    """A session for its holder."""
    address = services.target.address
    return WhoAmI(session.role.value, session.token.id, address, session.ends_at_ms)


async def tell_session(call: Call) -> Response:
    """Who am I."""
    if call.services.recording is not None:
        hello = call.services.recording.hello()
        return json_response(WhoAmI(hello.role, "", hello.address, 0, recorded=True))
    return json_response(who(call.services, call.who))


async def end_session(call: Call) -> Response:
    """Forget the cookie."""
    cookie = call.request.cookies.get(call.services.cookie_name, "")
    await run_in_threadpool(call.services.sessions.end_session, cookie)
    answer = json_response({})
    answer.delete_cookie(call.services.cookie_name)
    return answer


async def make_link(call: Call) -> Response:
    """A fresh link for the holder of the server's own token."""
    if call.who.token != call.services.target.token:
        detail = "only the token that the dashboard was started with makes links"
        raise HyperGPUError(Reason.ROLE_FORBIDDEN, detail, fix="paste your token into the page")
    return json_response(LinkAnswer(fresh_link(call.services)))


def fresh_link(services: DashboardServices) -> str:
    """An address with a one-time code in its fragment, which browsers send to nobody."""
    code = secrets.token_urlsafe(24)
    services.codes.add(code, monotonic_ms())
    host = services.settings.host[0] if services.settings.host else "127.0.0.1"
    return f"http://{host}:{services.port}/#code={code}"


SESSION_ENDPOINTS = (
    Endpoint(
        "POST",
        "/session",
        open_session,
        "Exchange a link's one-time code, or a token, for a cookie.",
        body=SessionRequest,
        result=WhoAmI,
        is_open=True,
    ),
    Endpoint("GET", "/session", tell_session, "Who am I.", result=WhoAmI, is_open=True),
    Endpoint("DELETE", "/session", end_session, "Forget the cookie.", is_open=True),
    Endpoint("POST", "/links", make_link, "Make a fresh one-time link.", result=LinkAnswer),
)

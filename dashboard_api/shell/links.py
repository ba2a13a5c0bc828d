"""Starts of the page for people: served here with its link, or a fresh link of one that runs."""

import asyncio
import json
import urllib.error
import urllib.request

import msgspec

from dashboard_api.config import DashboardSettings
from dashboard_api.shell.server import DashboardReady, serve
from dashboard_api.shell.session_routes import LinkAnswer
from dashboard_api.shell.targets import dashboard_target
from hypergpu.errors import HyperGPUError, Reason
from hypergpu.user.terminal.output import note, say
from hypergpu.wire.credentials import token_text

ANSWER_WITHIN_S = 10.0


def run_dashboard(settings: DashboardSettings) -> None:
    """Serve in this process, and say the link."""
    asyncio.run(serve(settings, dashboard_target(settings), _greet))


def _greet(ready: DashboardReady) -> None:
    say("watch and steer in a browser (this link works once, for ten minutes):")
    say()
    say(f"    {ready.link}")
    say()
    note("Ctrl-C ends it; a fresh link: hypergpu dashboard --link")


def ask_for_link(settings: DashboardSettings) -> str:
    """A fresh link of the page that runs on this machine with the same token.

    Raises:
        HyperGPUError: None runs, or it was started with another token.
    """
    target = dashboard_target(settings)
    address = f"http://127.0.0.1:{settings.port}/api/v1/links"
    headers = {"authorization": f"Bearer {token_text(target.token)}"}
    request = urllib.request.Request(address, b"", headers, method="POST")
    # Loopback is never behind a proxy.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=ANSWER_WITHIN_S) as answer:
            return msgspec.json.decode(answer.read(), type=LinkAnswer).link
    except urllib.error.HTTPError as error:
        reply = json.loads(error.read() or b"{}")
        detail = f"the page at port {settings.port} gives no link: {reply.get('message', error)}"
        raise HyperGPUError(Reason.ROLE_FORBIDDEN, detail, fix=reply.get("fix", "")) from error
    except OSError as away:
        detail = f"no page answers at port {settings.port} of this machine: {away}"
        fix = "start one: hypergpu up, or hypergpu dashboard"
        raise HyperGPUError(Reason.COORDINATOR_UNREACHABLE, detail, fix=fix) from away

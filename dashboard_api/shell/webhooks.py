"""Alerts to the operator's own addresses, when they begin and when they end."""

import asyncio
import urllib.error
import urllib.request
from collections.abc import Sequence
from typing import Any
from urllib.parse import urlsplit

import msgspec
import structlog

from dashboard_api.shell.feed import Feed
from hypergpu.errors import HyperGPUError, Reason

LOOK_EVERY_S = 1.0
ANSWER_WITHIN_S = 10.0
QUEUE_MOST = 100
_log = structlog.get_logger(__name__)


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """The operator named an address; what answers there names no other."""

    def redirect_request(self, *_: Any, **__: Any) -> None:
        return None


def checked_webhooks(addresses: Sequence[str]) -> tuple[str, ...]:
    """Addresses that are http or https.

    Raises:
        HyperGPUError: ARGUMENT_INVALID.
    """
    for address in addresses:
        parts = urlsplit(address)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            detail = f"the webhook {address!r} is no http or https address"
            raise HyperGPUError(Reason.ARGUMENT_INVALID, detail)
    return tuple(addresses)


class AlertSender:
    """Sends what changed among the alerts of one feed."""

    def __init__(self, feed: Feed, addresses: Sequence[str]) -> None:
        self._feed = feed
        self._addresses = addresses
        self._known: dict[str, Any] = {}
        self._opener = urllib.request.build_opener(_NoRedirects)

    async def run(self) -> None:
        """Look every second, until cancelled."""
        while self._addresses:
            await asyncio.sleep(LOOK_EVERY_S)
            for message in self.news()[:QUEUE_MOST]:
                for address in self._addresses:
                    await asyncio.to_thread(self._post, address, message)

    def news(self) -> list[dict[str, Any]]:
        """Alerts that began or ended since the last call."""
        alerts: dict[str, Any] = dict(self._feed.projection.state["alerts"])
        before, self._known = self._known, alerts
        began = [{"event": "began", "id": key, **alerts[key]} for key in alerts.keys() - before]
        ended_alerts = [
            {"event": "ended", "id": key, **before[key]} for key in before.keys() - alerts
        ]
        return began + ended_alerts

    def _post(self, address: str, message: dict[str, Any]) -> None:
        request = urllib.request.Request(  # noqa: S310 - checked_webhooks allows http and https
            address,
            msgspec.json.encode(message),
            {"content-type": "application/json", "user-agent": "hypergpu-dashboard"},
        )
        try:
            self._opener.open(request, timeout=ANSWER_WITHIN_S).close()
        except (OSError, ValueError, urllib.error.URLError) as failure:
            host = urlsplit(address).hostname
            _log.warning("a webhook did not take an alert", host=host, error=repr(failure))

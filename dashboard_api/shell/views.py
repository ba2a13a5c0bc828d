"""One feed for each token that is looked with: everybody sees what the coordinator tells them."""

import asyncio
from pathlib import Path

import msgspec

from dashboard_api.shell.follower import Follower
from dashboard_api.shell.recorder import HistoryRecorder, JobClocks
from dashboard_api.shell.session_store import Session
from dashboard_api.shell.token_checks import TokenChecks
from hypergpu.clock import monotonic_ms
from hypergpu.errors import HyperGPUError, Reason
from hypergpu.user.client import ConnectionTarget
from hypergpu.wire.credentials import Token

IDLE_AFTER_MS = 300_000

VIEWS_MAX = 64
"""Views at a time, each of a token of its own; the page's own is one of them."""


class View(msgspec.Struct):
    """A feed that runs, and when it was last of use."""

    token: Token
    follower: Follower
    task: asyncio.Task[None]
    used_at_ms: int

    @property
    def is_watched(self) -> bool:
        """Whether somebody follows its feed."""
        return bool(self.follower.feed.clients)


class Views:
    """Feeds by token. The server's own runs always, any other while it is looked at."""

    def __init__(
        self,
        target: ConnectionTarget,
        recorder: HistoryRecorder,
        data_dir: Path | None,
        checks: TokenChecks,
    ) -> None:
        self.target = target
        self._recorder = recorder
        self._checks = checks
        self._views: dict[str, View] = {}
        self._own_key = target.token.id
        self._own_data_dir = data_dir

    def start(self) -> Follower:
        """Start the server's own feed."""
        follower = Follower(self.target, self._recorder, self._own_data_dir)
        self._start(self.target.token, follower)
        return follower

    @property
    def own(self) -> Follower:
        """The server's own feed: for metrics, alerts and history."""
        return self._views[self._own_key].follower

    async def follower(self, session: Session) -> Follower:
        """The feed of a session, whose token the coordinator has taken.

        Raises:
            HyperGPUError: RATE_LIMITED, too many views are watched.
        """
        view = self._views.get(session.key)
        if view is None:
            self._make_room()
            target = msgspec.structs.replace(self.target, token=session.token)
            # Its token may see a part only, which the history must not take for the whole.
            follower = Follower(target, JobClocks(self._recorder.history), ends_refused=True)
            view = self._start(session.token, follower)
        view.used_at_ms = monotonic_ms()
        return view.follower

    def _start(self, token: Token, follower: Follower) -> View:
        view = View(token, follower, asyncio.create_task(follower.run()), monotonic_ms())
        self._views[token.id] = view
        view.task.add_done_callback(lambda _: self._forget(view))
        return view

    def _forget(self, view: View) -> None:
        """Drop a view that has ended: its token was refused, or it gave way."""
        if self._views.get(view.token.id) is view and view.token.id != self._own_key:
            del self._views[view.token.id]
        if view.follower.feed.refusal is not None:
            self._checks.forget(view.token)

    def _make_room(self) -> None:
        """Close what nobody looks at; if all are taken, the one that was used longest ago.

        Raises:
            HyperGPUError: RATE_LIMITED, every view is watched.
        """
        unwatched_views = sorted(
            (view for key, view in self._views.items() if key != self._own_key),
            key=lambda view: view.used_at_ms,
        )
        unwatched_views = [view for view in unwatched_views if not view.is_watched]
        excess = len(self._views) - VIEWS_MAX + 1
        now_ms = monotonic_ms()
        for number, view in enumerate(unwatched_views):
            if number < excess or now_ms - view.used_at_ms > IDLE_AFTER_MS:
                del self._views[view.token.id]
                view.task.cancel()
        if len(self._views) >= VIEWS_MAX:
            detail = f"people with {VIEWS_MAX} tokens watch this page now"
            fix = "close a page that nobody needs, or start another: hypergpu dashboard"
            raise HyperGPUError(Reason.RATE_LIMITED, detail, fix=fix)

    async def close(self) -> None:
        """Stop every feed."""
        tasks = [view.task for view in self._views.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

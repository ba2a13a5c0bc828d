"""One feed for each token that is looked with: everybody sees what the coordinator tells them."""

import asyncio
from pathlib import Path

import msgspec

from dashboard_api.shell.follower import Follower
from dashboard_api.shell.recorder import HistoryRecorder, JobClocks
from dashboard_api.shell.session_store import Session
from hypergpu.client import ConnectionTarget
from hypergpu.errors import HyperGPUError, Reason
from hypergpu.streams import monotonic_ms

VIEWS_MAX = 16
IDLE_AFTER_MS = 300_000
CHECKED_FOR_MS = 60_000
CHECK_WITHIN_S = 10.0


class View(msgspec.Struct):
    """A feed that runs, and when it was last of use."""

    follower: Follower
    task: asyncio.Task[None]
    used_at_ms: int


class Views:
    """Feeds by token. The server's own runs always, any other while it is looked at."""

    def __init__(
        self, target: ConnectionTarget, recorder: HistoryRecorder, data_dir: Path | None
    ) -> None:
        self.target = target
        self._recorder = recorder
        self._views: dict[str, View] = {}
        self.own_key = Session(target.token, 0).key
        self._own_data_dir = data_dir

    def start(self) -> Follower:
        """Start the server's own feed."""
        follower = Follower(self.target, self._recorder, self._own_data_dir)
        self._start(self.own_key, follower)
        return follower

    @property
    def own(self) -> Follower:
        """The server's own feed: for metrics, alerts and history."""
        return self._views[self.own_key].follower

    async def follower(self, session: Session) -> Follower:
        """The feed of a session; it has told its first state.

        Raises:
            HyperGPUError: The coordinator refuses the token, or too many are looked with.
        """
        view = self._views.get(session.key)
        if view is None:
            self._close_idle()
            if len(self._views) >= VIEWS_MAX:
                detail = f"{VIEWS_MAX} tokens are being looked with"
                raise HyperGPUError(Reason.RATE_LIMITED, detail)
            target = msgspec.structs.replace(self.target, token=session.token)
            # Its token may see a part only, which the history must not take for the whole.
            self._start(session.key, Follower(target, JobClocks(self._recorder.history)))
            view = self._views[session.key]
        view.used_at_ms = monotonic_ms()
        return view.follower

    def _start(self, key: str, follower: Follower) -> None:
        task = asyncio.create_task(follower.run())
        self._views[key] = View(follower, task, monotonic_ms())

    def _close_idle(self) -> None:
        now_ms = monotonic_ms()
        for key, view in list(self._views.items()):
            is_idle = not view.follower.feed.clients and now_ms - view.used_at_ms > IDLE_AFTER_MS
            if is_idle and key != self.own_key:
                view.task.cancel()
                del self._views[key]

    async def close(self) -> None:
        """Stop every feed."""
        tasks = [view.task for view in self._views.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

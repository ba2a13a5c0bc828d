"""Everything that answers to requests share."""

import asyncio
import contextlib
from pathlib import Path

import msgspec
from starlette.concurrency import run_in_threadpool

from dashboard_api.config import DashboardSettings
from dashboard_api.core.outbox import STALLED_AFTER_MS
from dashboard_api.core.sessions import CodeBook
from dashboard_api.shell.history import AuditLine, HistoryStore
from dashboard_api.shell.page import PAGE_FOLDER
from dashboard_api.shell.recorder import HistoryRecorder
from dashboard_api.shell.recording import Recording
from dashboard_api.shell.session_store import Session, SessionStore
from dashboard_api.shell.token_checks import TokenChecks
from dashboard_api.shell.uploads import Uploads
from dashboard_api.shell.views import Views
from hypergpu.clock import unix_ms
from hypergpu.errors import HyperGPUError, Reason
from hypergpu.user.client import AsyncCoordinator, ConnectionTarget

CONNECTED_WITHIN_S = 2.0
"""How long the first call of a session waits for its connection."""


class DashboardServices(msgspec.Struct):
    """Parts of one server."""

    settings: DashboardSettings
    target: ConnectionTarget
    history: HistoryStore
    recorder: HistoryRecorder
    sessions: SessionStore
    codes: CodeBook
    uploads: Uploads
    views: Views
    checks: TokenChecks
    port: int
    page_folder: Path = PAGE_FOLDER
    stalled_after_ms: int = STALLED_AFTER_MS
    recording: Recording | None = None

    @property
    def cookie_name(self) -> str:
        """Cookies know no ports: servers beside each other need names of their own."""
        return f"hypergpu_session_{self.port}"

    async def coordinator(self, session: Session) -> AsyncCoordinator:
        """A connection with the session's own token.

        Raises:
            HyperGPUError: The coordinator is away.
        """
        follower = await self.views.follower(session)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CONNECTED_WITHIN_S):
                await follower.has_answered.wait()
        if follower.coordinator is None:
            detail = f"the coordinator at {self.target.address} is away"
            raise HyperGPUError(Reason.COORDINATOR_UNREACHABLE, detail)
        return follower.coordinator

    async def note_action(self, session: Session | None, action: str, outcome: str) -> None:
        """Write an action into the audit log."""
        token, role = (session.token.id, session.role.value) if session else ("", "")
        line = AuditLine(unix_ms(), token, role, action, outcome)
        await run_in_threadpool(self.history.add_audit, line)

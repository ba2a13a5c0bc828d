"""The loop that sends: rows of each job's journal in order, a batch at a time.

A job's cursor moves once its batch is acknowledged, so a kill in between sends the batch again. A
stream that no longer has the newest acknowledged entry lost its tail: cursors go back to what it
still has. Nothing waits for any of it.
"""

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple, Protocol

import structlog

from coordinator.shell.outbox.cursors import CursorStore, SentCursor
from coordinator.shell.outbox.messages import (
    OutboxMessage,
    StreamAwayError,
    measured_work,
    messages_of,
)
from coordinator.shell.store.journal.journal import Journal
from coordinator.shell.store.journal.records import Entry
from hypergpu.ids import JobId, NodeId
from hypergpu.statements import SignedReceipt

if TYPE_CHECKING:
    # Its package is an extra.
    from coordinator.shell.outbox.redis_stream import RedisStream

log = structlog.get_logger()

ROWS_AT_ONCE = 200
_CHECK_EVERY_S = 5.0
"""How often a stream is asked, while nothing happens, whether it still has what it took."""
_RETRY_FIRST_S, _RETRY_MOST_S = 0.2, 30.0


class ReceiptMaker(Protocol):
    """Part of the payments package."""

    async def receipts(
        self, job_id: JobId, wanted: Mapping[NodeId, int]
    ) -> Sequence[SignedReceipt]: ...


class OutboxSource(NamedTuple):
    """Where messages come from."""

    journal: Journal
    jobs: Callable[[], Iterable[JobId]]
    """Jobs whose journals are sent."""
    payments: ReceiptMaker | None
    """Makes receipts; None: there are none."""


class Outbox:
    """Sends until it is cancelled."""

    def __init__(
        self,
        source: OutboxSource,
        stream: "RedisStream",
        cursors: CursorStore,
        tell: Callable[[str], None],
        *,
        check_every_s: float = _CHECK_EVERY_S,
    ) -> None:
        """Nothing is sent yet.

        Args:
            source: What is sent.
            stream: Takes it.
            cursors: How far it was sent.
            tell: Gets why nothing is sent now; empty: all is well.
            check_every_s: How often an idle stream is checked.
        """
        self._source = source
        self._stream = stream
        self._store = cursors
        self._tell = tell
        self._check_every_s = check_every_s
        self._has_rows = asyncio.Event()
        self._changed: set[JobId] = set()
        self._cursors: dict[JobId, SentCursor] = {}
        self._newest_id = ""

    def wake(self, jobs: Iterable[JobId]) -> None:
        """Note that jobs have new durable rows. Call on the event loop."""
        self._changed.update(jobs)
        self._has_rows.set()

    async def run(self) -> None:
        """Send for ever."""
        has_cursors, wait_s = False, _RETRY_FIRST_S
        while True:
            self.wake(self._source.jobs())
            try:
                if not has_cursors:
                    await asyncio.to_thread(self._read_cursors)
                    has_cursors = True
                while True:
                    await self._send_changed()
                    wait_s = _RETRY_FIRST_S
                    self._tell("")
                    with suppress(TimeoutError):
                        async with asyncio.timeout(self._check_every_s):
                            await self._has_rows.wait()
            except StreamAwayError as away:
                self._tell(str(away))
            except Exception as error:
                log.exception("events are not sent")
                self._tell(f"events are not sent, see the coordinator's log: {error}")
            await asyncio.sleep(wait_s)
            wait_s = min(2 * wait_s, _RETRY_MOST_S)

    async def close(self) -> None:
        """Close what is open, once `run` no longer runs."""
        await self._stream.close()
        await asyncio.to_thread(self._store.close)

    def _read_cursors(self) -> None:
        known_jobs = set(self._source.journal.jobs())
        for job_id, cursor in self._store.cursors().items():
            if job_id not in known_jobs:
                self._store.forget(job_id)
            elif self._follows(job_id, cursor):
                self._cursors[job_id] = cursor
        newest = max(self._cursors.values(), key=_id_order, default=SentCursor(0))
        self._newest_id = newest.newest_id

    def _follows(self, job_id: JobId, cursor: SentCursor) -> bool:
        """Whether the journal has the row before the cursor; else it is an older copy."""
        if not cursor.sequence:
            return True
        if self._source.journal.read(job_id, cursor.sequence - 1, limit=1).entries:
            return True
        log.warning("the journal is older than what was sent of it: sent anew", job_id=job_id)
        return False

    async def _send_changed(self) -> None:
        """Send what is new, and look whether what was sent before is still there."""
        self._has_rows.clear()
        changed_jobs, self._changed = self._changed, set()
        try:
            await self._append([])
            while changed_jobs:
                job_id = min(changed_jobs)
                if await self._send_rows(job_id) < ROWS_AT_ONCE:
                    changed_jobs.discard(job_id)
        except BaseException:
            self._changed |= changed_jobs
            raise

    async def _send_rows(self, job_id: JobId) -> int:
        """Send a job's next rows; returns how many there were."""
        cursor = self._cursors.get(job_id, SentCursor(0))
        read = self._source.journal.read
        rows = (await asyncio.to_thread(read, job_id, cursor.sequence, limit=ROWS_AT_ONCE)).entries
        if not rows:
            return 0
        messages = [message for row in rows for message in await self._messages(row)]
        ids = await self._append(messages)
        if ids is None:
            return ROWS_AT_ONCE  # The cursor went back: there is more.
        new_cursor = SentCursor(rows[-1].sequence + 1, ids[-1] if ids else cursor.newest_id)
        await self._keep({job_id: new_cursor})
        return len(rows)

    async def _messages(self, row: Entry) -> list[OutboxMessage]:
        receipt_wishes, payments = measured_work(row), self._source.payments
        if not receipt_wishes or payments is None:
            return messages_of(row, ())
        return messages_of(row, await payments.receipts(row.job_id, receipt_wishes))

    async def _append(self, messages: Sequence[OutboxMessage]) -> list[str] | None:
        """Append; returns the new ids, or None where the stream had lost its tail."""
        if not messages and not self._newest_id:
            return []
        ids = await self._stream.append(messages, self._newest_id)
        if ids is None:
            await self._go_back()
        elif ids:
            self._newest_id = ids[-1]
        return ids

    async def _go_back(self) -> None:
        """Move each job's cursor back to its newest row that the stream still has.

        That row is sent again: of several messages some may be lost.
        """
        sent_jobs = {job_id for job_id, cursor in self._cursors.items() if cursor.newest_id}
        sequences = await self._stream.newest_sequences(sent_jobs)
        cursors = {job_id: SentCursor(*sequences.get(job_id, (0, ""))) for job_id in sent_jobs}
        log.warning("the stream of events lost entries: they are sent again", jobs=len(sent_jobs))
        await self._keep(cursors)
        self._newest_id = max(cursors.values(), key=_id_order, default=SentCursor(0)).newest_id
        self.wake(sent_jobs)

    async def _keep(self, cursors: Mapping[JobId, SentCursor]) -> None:
        await asyncio.to_thread(self._store.keep, cursors)
        self._cursors.update(cursors)


def _id_order(cursor: SentCursor) -> tuple[int, int]:
    """Order of entries in a stream."""
    milliseconds, _, number = cursor.newest_id.partition("-")
    return int(milliseconds or 0), int(number or 0)

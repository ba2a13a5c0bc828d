"""Answers batches in the background, each line once, through restarts of everything.

A line whose model is not free, or whose coordinator is gone, is asked again until the batch's
window is over. What came is kept line by line, so that a process that is killed costs the lines
that were under way and no more.
"""

import asyncio
import secrets
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import msgspec
import structlog

from hypergpu.errors import HyperGPUError, RemoteFailureError
from hypergpu.user.serving.answering import UNREACHABLE, RequestDesk, api_error, decoded_request
from hypergpu.user.serving.api_keys import ApiKeys, ApiKeyView
from hypergpu.user.serving.batch_forms import (
    ENDPOINTS,
    BatchFaults,
    BatchLine,
    InputFaultsError,
    RequestBatch,
    RequestCounts,
    answer_line,
    batch_lines,
)
from hypergpu.user.serving.batch_store import BatchStore
from hypergpu.user.serving.openai_answers import AnswerForm
from hypergpu.user.serving.openai_requests import ApiError

LINES_AT_ONCE = 32
"""Lines that are under way at a time, of all batches."""
_LOOK_S = 0.5
_WAIT_S_LEAST, _WAIT_S_MOST = 0.5, 30.0
"""Time between two tries of a line."""
_CLEAN_S = 3600.0
_PASSING = frozenset({"rate_limit_exceeded", "model_not_ready", UNREACHABLE})
_log = structlog.get_logger(__name__)


class _WindowOverError(Exception):
    """A batch was cancelled, or its time is over."""


class BatchRunner:
    """Answers the batches of a store.

    Args:
        store: Where batches are kept.
        keys: Whose budgets they use.
        desk: Opens the requests of lines.
    """

    def __init__(self, store: BatchStore, keys: ApiKeys, desk: RequestDesk) -> None:
        self._store = store
        self._keys = keys
        self._desk = desk
        self._places = asyncio.Semaphore(LINES_AT_ONCE)
        self._running: dict[str, asyncio.Task[None]] = {}

    async def run(self) -> None:
        """Answer batches until cancelled; only one process of a user does."""
        cleaned_s = 0.0
        try:
            while True:
                if await asyncio.to_thread(self._store.claim):
                    await self._begin_open()
                    if time.monotonic() - cleaned_s > _CLEAN_S:
                        cleaned_s = time.monotonic()
                        await asyncio.to_thread(self._store.delete_old)
                await asyncio.sleep(_LOOK_S)
        finally:
            for task in self._running.values():
                task.cancel()
            await asyncio.gather(*self._running.values(), return_exceptions=True)

    async def _begin_open(self) -> None:
        for key_id, batch in await asyncio.to_thread(self._store.open_batches):
            if batch.id not in self._running:
                task = asyncio.create_task(self._answer_batch(key_id, batch))
                self._running[batch.id] = task
                task.add_done_callback(partial(self._note_end, batch.id))

    def _note_end(self, batch_id: str, task: asyncio.Task[None]) -> None:
        self._running.pop(batch_id, None)
        if not task.cancelled() and (error := task.exception()) is not None:
            # It is begun again at the next look.
            _log.warning("batch.broke_off", batch=batch_id, error=type(error).__name__)

    async def _answer_batch(self, key_id: str, batch: RequestBatch) -> None:
        path = self._store.path(batch.input_file_id)
        try:
            lines = await asyncio.to_thread(batch_lines, path, batch.endpoint)
        except (InputFaultsError, OSError) as error:
            await self._put(key_id, _failed_batch(batch, error))
            return
        if batch.in_progress_at is None:
            batch = msgspec.structs.replace(batch, in_progress_at=_now_s())
        batch = msgspec.structs.replace(
            batch, status="in_progress", request_counts=RequestCounts(total=len(lines))
        )
        await self._put(key_id, batch)
        answered_numbers = await asyncio.to_thread(self._store.answered_lines, batch.id)
        open_lines = [line for line in lines if line.number not in answered_numbers]
        try:
            async with asyncio.TaskGroup() as group:
                watch = group.create_task(self._watch(key_id, batch))
                line_iterator = iter(open_lines)
                workers = [
                    group.create_task(self._answer_lines(key_id, batch, line_iterator))
                    for _ in range(min(LINES_AT_ONCE, len(open_lines)))
                ]
                for worker in workers:
                    await worker
                watch.cancel()
        except* _WindowOverError:
            pass
        await self._finish(key_id, batch)

    async def _watch(self, key_id: str, batch: RequestBatch) -> None:
        """Wait until the batch is to end before its lines are answered.

        Raises:
            _WindowOverError: It is.
        """
        while _now_s() < batch.expires_at:
            newest = await asyncio.to_thread(self._store.batch, key_id, batch.id)
            if newest is None or newest.status == "cancelling":
                break
            await asyncio.sleep(_LOOK_S)
        raise _WindowOverError

    async def _answer_lines(
        self, key_id: str, batch: RequestBatch, line_iterator: Iterator[BatchLine]
    ) -> None:
        for line in line_iterator:
            wait_s = _WAIT_S_LEAST
            while not await self._answer_line(key_id, batch, line):
                await asyncio.sleep(wait_s)
                wait_s = min(2 * wait_s, _WAIT_S_MOST)

    async def _answer_line(self, key_id: str, batch: RequestBatch, line: BatchLine) -> bool:
        """Ask for one line. False: it is to be asked for again."""
        line_id = f"batch_req_{secrets.token_hex(12)}"
        status = 200
        async with self._places:
            try:
                body = await self._body(key_id, batch, line, line_id)
            except RemoteFailureError:
                return False
            except (ApiError, HyperGPUError) as failure:
                error = failure if isinstance(failure, ApiError) else api_error(failure)
                if error.code in _PASSING:
                    return False
                status, body = error.status, error.body()
        answer = answer_line(line_id, line.custom_id, status, body)
        note = partial(self._store.note_answer, batch.id, line.number, answer)
        await asyncio.to_thread(note, is_error=status != 200)
        return True

    async def _body(
        self, key_id: str, batch: RequestBatch, line: BatchLine, line_id: str
    ) -> dict[str, Any]:
        key = await asyncio.to_thread(self._good_key, key_id)
        line_request = decoded_request(line.body, ENDPOINTS[batch.endpoint])
        if line_request.has_stream:
            rule = "stream must be left out: a batch has whole answers"
            raise ApiError(rule, fix="leave stream out", param="stream")
        is_chat = batch.endpoint == "/v1/chat/completions"
        form = AnswerForm.begin(line_id, line_request.model, is_chat=is_chat)
        return await self._desk.answer(key, form, line_request)

    def _good_key(self, key_id: str) -> ApiKeyView:
        for key in self._keys.all():
            if key.id == key_id and key.is_good:
                return key
        detail = "the batch's API key was revoked or is over"
        fix = "begin the batch again with a key of `hypergpu key add`"
        raise ApiError(detail, fix=fix, status=401, code="invalid_api_key")

    async def _finish(self, key_id: str, batch: RequestBatch) -> None:
        write = partial(self._store.write_answers, key_id, batch.id)
        output_id = await asyncio.to_thread(partial(write, is_error=False))
        error_id = await asyncio.to_thread(partial(write, is_error=True))
        newest = await asyncio.to_thread(self._store.batch, key_id, batch.id)
        if newest is not None:
            ended_batch = msgspec.structs.replace(
                _ended_batch(newest),
                finalizing_at=_now_s(),
                output_file_id=output_id,
                error_file_id=error_id,
            )
            await self._put(key_id, ended_batch)

    async def _put(self, key_id: str, batch: RequestBatch) -> None:
        await asyncio.to_thread(self._store.put, key_id, batch)


def _failed_batch(batch: RequestBatch, error: InputFaultsError | OSError) -> RequestBatch:
    faults = error.faults if isinstance(error, InputFaultsError) else []
    return msgspec.structs.replace(
        batch, status="failed", failed_at=_now_s(), errors=BatchFaults(tuple(faults))
    )


def _ended_batch(batch: RequestBatch) -> RequestBatch:
    """The batch at its end: all lines have an answer, it was cancelled, or its time is over."""
    now_s, counts = _now_s(), batch.request_counts
    if counts.completed + counts.failed == counts.total:
        return msgspec.structs.replace(batch, status="completed", completed_at=now_s)
    if batch.status == "cancelling":
        return msgspec.structs.replace(batch, status="cancelled", cancelled_at=now_s)
    return msgspec.structs.replace(batch, status="expired", expired_at=now_s)


def _now_s() -> int:
    return int(time.time())

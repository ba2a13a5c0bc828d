"""The API's files and batches. A key sees its own alone."""

import asyncio
import secrets
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import msgspec
from starlette.datastructures import UploadFile
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import FileResponse, Response

from hypergpu.user.serving.answering import decoded_request
from hypergpu.user.serving.api_keys import ApiKeyView
from hypergpu.user.serving.batch_forms import (
    ENDPOINTS,
    BatchCreate,
    RequestBatch,
    StoredFile,
    has_short_metadata,
    window_seconds,
)
from hypergpu.user.serving.batch_store import BatchStore
from hypergpu.user.serving.bodies import json_answer, read_body
from hypergpu.user.serving.openai_requests import ApiError

FILE_BYTES_MOST = 100 << 20
FILES_MOST = 200
"""Files of a key."""
BATCHES_MOST = 100
"""Batches of a key that have not ended."""
_FORM_BYTES_MOST = FILE_BYTES_MOST + (1 << 16)
_FIELDS_MOST = 8
_NAME_LENGTH_MOST = 200
_COPY_BYTES = 1 << 20
_PAGE_USUAL, _PAGE_MOST = 20, 100


class BatchApi:
    """Answers of the API's routes on files and batches.

    Args:
        store: Where they are kept.
    """

    def __init__(self, store: BatchStore) -> None:
        self._store = store

    async def send_file(self, request: Request, key: ApiKeyView) -> Response:
        """Keep a file that is sent as a form."""
        _check_size(request)
        if len(await asyncio.to_thread(self._store.files, key.id)) >= FILES_MOST:
            detail = f"this key has {FILES_MOST} files. Fix: delete some: DELETE /v1/files/ID"
            raise _limit_error(detail, "delete some: DELETE /v1/files/ID")
        try:
            async with request.form(max_files=1, max_fields=_FIELDS_MOST) as form:
                upload = form.get("file")
                if not isinstance(upload, UploadFile):
                    raise ApiError(
                        "file must be a file of a form",
                        fix="send multipart/form-data with the fields file and purpose",
                        param="file",
                    )
                if form.get("purpose") != "batch":
                    raise ApiError(
                        "purpose must be batch", fix="send purpose=batch", param="purpose"
                    )
                file = await self._keep(upload, key)
        except HTTPException as error:
            fix = "send multipart/form-data with one file"
            raise ApiError(f"the form is not right: {error.detail}", fix=fix) from error
        return json_answer(msgspec.to_builtins(file))

    async def _keep(self, upload: UploadFile, key: ApiKeyView) -> StoredFile:
        file_id, path = await asyncio.to_thread(self._store.new_path)
        try:
            with path.open("wb") as file:
                while piece := await upload.read(_COPY_BYTES):
                    await asyncio.to_thread(file.write, piece)
            name = (upload.filename or "file.jsonl")[:_NAME_LENGTH_MOST]
            note = partial(self._store.add_file, key.id, file_id, name, "batch")
            return await asyncio.to_thread(note)
        except BaseException:
            path.unlink(missing_ok=True)
            raise

    async def list_files(self, request: Request, key: ApiKeyView) -> Response:
        """Files of the key, the newest first."""
        return json_answer(_page(request, await asyncio.to_thread(self._store.files, key.id)))

    async def show_file(self, request: Request, key: ApiKeyView) -> Response:
        """Tell what is known of a file."""
        return json_answer(msgspec.to_builtins(await self._file(request, key)))

    async def read_file(self, request: Request, key: ApiKeyView) -> Response:
        """A file's content."""
        file = await self._file(request, key)
        path = self._store.path(file.id)
        return FileResponse(path, media_type="application/jsonl", filename=file.filename)

    async def delete_file(self, request: Request, key: ApiKeyView) -> Response:
        """Delete a file that no batch is reading."""
        file = await self._file(request, key)
        batches = await asyncio.to_thread(self._store.batches, key.id)
        for batch in batches:
            if batch.input_file_id == file.id and not batch.has_ended:
                detail = f"{batch.id} is reading it. Fix: cancel the batch first"
                fix = "wait until the batch ends, or cancel it"
                raise ApiError(detail, fix=fix, status=409, param="file_id")
        await asyncio.to_thread(self._store.delete_file, file.id)
        return json_answer({"id": file.id, "object": "file", "deleted": True})

    async def create(self, request: Request, key: ApiKeyView) -> Response:
        """Begin a batch; its input is looked at soon after."""
        creation = decoded_request(await read_body(request), BatchCreate)
        if creation.endpoint not in ENDPOINTS:
            rule = f"endpoint must be one of {', '.join(ENDPOINTS)}"
            raise ApiError(rule, fix="change endpoint", param="endpoint")
        window_s = window_seconds(creation.completion_window)
        if window_s is None:
            rule = "completion_window must be 1h to 720h, or days: 24h, 7d"
            raise ApiError(rule, fix="change completion_window", param="completion_window")
        if not has_short_metadata(creation):
            rule = "metadata must be 16 texts of 512 characters at most, by names of 64"
            raise ApiError(rule, fix="shorten metadata", param="metadata")
        if await asyncio.to_thread(self._store.file, key.id, creation.input_file_id) is None:
            raise _unknown_object("file", creation.input_file_id)
        batches = await asyncio.to_thread(self._store.batches, key.id)
        if sum(not batch.has_ended for batch in batches) >= BATCHES_MOST:
            detail = f"{BATCHES_MOST} batches of this key are open already"
            raise _limit_error(detail, "wait until one ends, or cancel one")
        now_s = int(time.time())
        batch = RequestBatch(
            id=f"batch_{secrets.token_hex(12)}",
            endpoint=creation.endpoint,
            input_file_id=creation.input_file_id,
            completion_window=creation.completion_window,
            created_at=now_s,
            expires_at=now_s + window_s,
            metadata=creation.metadata,
        )
        await asyncio.to_thread(self._store.put, key.id, batch)
        return json_answer(msgspec.to_builtins(batch))

    async def list_batches(self, request: Request, key: ApiKeyView) -> Response:
        """Batches of the key, the newest first."""
        return json_answer(_page(request, await asyncio.to_thread(self._store.batches, key.id)))

    async def show(self, request: Request, key: ApiKeyView) -> Response:
        """A batch as it is now."""
        return json_answer(msgspec.to_builtins(await self._batch(request, key)))

    async def cancel(self, request: Request, key: ApiKeyView) -> Response:
        """End a batch; what was answered is written."""
        batch = await self._batch(request, key)
        if not batch.has_ended:
            await asyncio.to_thread(self._store.cancel, batch.id)
        return json_answer(msgspec.to_builtins(await self._batch(request, key)))

    async def _file(self, request: Request, key: ApiKeyView) -> StoredFile:
        file_id = request.path_params["file"]
        file = await asyncio.to_thread(self._store.file, key.id, file_id)
        if file is None:
            raise _unknown_object("file", file_id)
        return file

    async def _batch(self, request: Request, key: ApiKeyView) -> RequestBatch:
        batch_id = request.path_params["batch"]
        batch = await asyncio.to_thread(self._store.batch, key.id, batch_id)
        if batch is None:
            raise _unknown_object("batch", batch_id)
        return batch


def _check_size(request: Request) -> None:
    """Refuse a form before it is read.

    Raises:
        ApiError: It states no length, or one beyond the limit.
    """
    text = request.headers.get("content-length", "")
    if not text.isdecimal():
        fix = "send the header content-length"
        raise ApiError("the request must state its content-length", fix=fix, status=411)
    if int(text) > _FORM_BYTES_MOST:
        detail = f"a file has {FILE_BYTES_MOST:,} bytes at most"
        raise ApiError(detail, fix="divide it into several files", status=413)


def _page(request: Request, every: Sequence[StoredFile] | Sequence[RequestBatch]) -> dict[str, Any]:
    """A page of a list, as OpenAI's clients turn them.

    Raises:
        ApiError: The page's limits are not right.
    """
    limit_text = request.query_params.get("limit", str(_PAGE_USUAL))
    if not limit_text.isdecimal() or not 0 < int(limit_text) <= _PAGE_MOST:
        rule = f"limit must be 1 to {_PAGE_MOST}"
        raise ApiError(rule, fix="change limit", param="limit")
    ids = [each.id for each in every]
    after = request.query_params.get("after")
    if after is not None and after not in ids:
        raise _unknown_object("object", after)
    begin = 0 if after is None else ids.index(after) + 1
    entries = every[begin : begin + int(limit_text)]
    return {
        "object": "list",
        "data": [msgspec.to_builtins(each) for each in entries],
        "first_id": entries[0].id if entries else None,
        "last_id": entries[-1].id if entries else None,
        "has_more": begin + len(entries) < len(ids),
    }


def _unknown_object(what: str, name: str) -> ApiError:
    return ApiError(
        f"this key has no {what} {name[:100]!r}",
        fix=_LIST_FIXES.get(what, "leave after out to begin at the first"),
        status=404,
        param=f"{what}_id",
    )


_LIST_FIXES = {"file": "GET /v1/files lists files", "batch": "GET /v1/batches lists batches"}


def _limit_error(detail: str, fix: str) -> ApiError:
    return ApiError(
        detail, fix=fix, status=429, kind="rate_limit_error", code="rate_limit_exceeded"
    )

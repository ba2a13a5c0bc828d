"""Data sets from the browser, in pieces."""

import msgspec
from starlette.responses import Response

from dashboard_api.shell.api import Call, Endpoint, Parameter, read_body
from dashboard_api.shell.failures import json_response
from dashboard_api.shell.uploads import PIECE_BYTES_MAX, Upload
from hypergpu.errors import HyperGPUError, Reason
from hypergpu.wire.credentials import Role


class UploadRequest(msgspec.Struct, forbid_unknown_fields=True):
    """A data set that is to be sent: a file, or an archive that is unpacked."""

    name: str
    size_bytes: int


class UploadAnswer(msgspec.Struct):
    """How far an upload is."""

    id: str
    name: str
    size_bytes: int
    committed_bytes: int
    piece_bytes_max: int = PIECE_BYTES_MAX


def _answer(upload: Upload, status: int = 200) -> Response:
    fields = (upload.id, upload.name, upload.size_bytes, upload.committed_bytes)
    return json_response(UploadAnswer(*fields), status)


async def begin_upload(call: Call) -> Response:
    """Begin an upload."""
    request = await call.body(UploadRequest)
    session = call.who
    if session.role not in (Role.USER, Role.OPERATOR):
        detail = f"a {session.role.value}'s token makes no jobs, so it sends no data"
        raise HyperGPUError(Reason.ROLE_FORBIDDEN, detail)
    await call.services.coordinator(session)
    uploads = call.services.uploads
    return _answer(uploads.begin(session.key, request.name, request.size_bytes), 201)


async def append_piece(call: Call) -> Response:
    """Add a piece at an offset."""
    upload = call.services.uploads.find(call.path("upload"), call.who.key)
    piece = await read_body(call.request, PIECE_BYTES_MAX)
    offset = call.whole("offset", 0)
    return _answer(await call.services.uploads.append(upload, offset, piece))


async def tell_upload(call: Call) -> Response:
    """How far an upload is."""
    return _answer(call.services.uploads.find(call.path("upload"), call.who.key))


UPLOAD_ENDPOINTS = (
    Endpoint(
        "POST",
        "/uploads",
        begin_upload,
        "Begin to upload a data set.",
        body=UploadRequest,
        result=UploadAnswer,
    ),
    Endpoint(
        "PUT",
        "/uploads/{upload}",
        append_piece,
        "Add a piece at an offset; the answer says where to go on.",
        (Parameter("offset", "Bytes before the piece.", "integer"),),
        body=bytes,
        result=UploadAnswer,
    ),
    Endpoint("GET", "/uploads/{upload}", tell_upload, "How far an upload is.", result=UploadAnswer),
)

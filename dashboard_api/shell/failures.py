"""Failures as answers: a number, a message, a fix and a fitting HTTP status."""

import msgspec
from starlette.responses import Response

from hypergpu.errors import Reason
from hypergpu.user.client import HyperGPUError, RemoteFailureError

STATUSES = {
    "INVALID_ARGUMENT": 400,
    "OUT_OF_RANGE": 400,
    "UNAUTHENTICATED": 401,
    "PERMISSION_DENIED": 403,
    "NOT_FOUND": 404,
    "ALREADY_EXISTS": 409,
    "ABORTED": 409,
    "FAILED_PRECONDITION": 409,
    "RESOURCE_EXHAUSTED": 429,
    "UNIMPLEMENTED": 501,
    "UNAVAILABLE": 503,
    "DEADLINE_EXCEEDED": 504,
}


class FailureAnswer(msgspec.Struct, frozen=True):
    """Body of every answer that is no success."""

    number: int
    message: str
    fix: str


class RequestRefusedError(Exception):
    """A request that is refused by this server itself."""

    def __init__(self, status: int, message: str, fix: str) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.fix = fix


def failure_response(failure: Exception) -> Response:
    """The answer that tells a failure."""
    if isinstance(failure, HyperGPUError):
        body = FailureAnswer(failure.reason.number, failure.detail, failure.fix)
        return json_response(body, STATUSES.get(failure.reason.status, 500))
    if isinstance(failure, RemoteFailureError):
        return json_response(FailureAnswer(failure.number, failure.detail, failure.fix), 502)
    if isinstance(failure, RequestRefusedError):
        number = Reason.ARGUMENT_INVALID.number
        return json_response(FailureAnswer(number, failure.message, failure.fix), failure.status)
    raise failure


def json_response(body: object, status: int = 200) -> Response:
    """JSON that no cache keeps."""
    content = msgspec.json.encode(body)
    headers = {"cache-control": "no-store"}
    return Response(content, status, headers, media_type="application/json")

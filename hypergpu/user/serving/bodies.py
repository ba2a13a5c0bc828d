"""Bodies of the API's requests and answers."""

from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from hypergpu.serving.calls import CALL_BYTES_MOST
from hypergpu.user.serving.openai_requests import ApiError


async def read_body(request: Request) -> bytes:
    """The body of a request; it is not read beyond its limit.

    Raises:
        ApiError: It is too large.
    """
    content = bytearray()
    async for piece in request.stream():
        content += piece
        if len(content) > CALL_BYTES_MOST:
            detail = f"the request has more than {CALL_BYTES_MOST:,} bytes"
            raise ApiError(detail, fix="shorten it", status=413)
    return bytes(content)


def json_answer(
    body: dict[str, Any], status: int = 200, headers: dict[str, str] | None = None
) -> Response:
    """A body of the API."""
    content = msgspec.json.encode(body)
    return Response(content, status, media_type="application/json", headers=headers)

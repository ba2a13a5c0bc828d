"""Files and batches as OpenAI's API has them, and the lines of a batch's input."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec

from hypergpu.serving.calls import CALL_BYTES_MOST
from hypergpu.user.serving.openai_requests import ChatRequest, CompletionRequest

ERRORS_MOST = 20
"""Faults of an input that are told; there may be more."""
ENDPOINTS: dict[str, type[ChatRequest] | type[CompletionRequest]] = {
    "/v1/chat/completions": ChatRequest,
    "/v1/completions": CompletionRequest,
}
"""What a batch may ask for, and the form of its requests."""
Status = Literal[
    "validating", "in_progress", "finalizing", "completed", "failed", "expired", "cancelling",
    "cancelled",
]  # fmt: skip
ENDED = frozenset({"completed", "failed", "expired", "cancelled"})


class StoredFile(msgspec.Struct, frozen=True, kw_only=True):
    """A file that a key's owner sent, or that a batch wrote."""

    id: str
    filename: str
    bytes: int
    created_at: int
    expires_at: int
    purpose: str
    object: str = "file"
    status: str = "processed"


class BatchFault(msgspec.Struct, frozen=True):
    """Why a batch's input is not right."""

    code: str
    message: str
    line: int
    param: str | None = None


class BatchFaults(msgspec.Struct, frozen=True):
    """A list of OpenAI's form."""

    data: tuple[BatchFault, ...]
    object: str = "list"


class RequestCounts(msgspec.Struct, frozen=True):
    """Requests of a batch."""

    total: int = 0
    completed: int = 0
    failed: int = 0


class RequestBatch(msgspec.Struct, frozen=True, kw_only=True):
    """A batch. Times are seconds of Unix time."""

    id: str
    endpoint: str
    input_file_id: str
    completion_window: str
    created_at: int
    expires_at: int
    status: Status = "validating"
    object: str = "batch"
    errors: BatchFaults | None = None
    output_file_id: str | None = None
    error_file_id: str | None = None
    in_progress_at: int | None = None
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    request_counts: RequestCounts = RequestCounts()
    metadata: dict[str, str] | None = None

    @property
    def has_ended(self) -> bool:
        """Whether nothing more comes of it."""
        return self.status in ENDED


class BatchCreate(msgspec.Struct, frozen=True, kw_only=True):
    """What a caller sends to begin a batch."""

    input_file_id: str
    endpoint: str
    completion_window: str = "24h"
    metadata: dict[str, str] | None = None


class BatchLine(NamedTuple):
    """One request of a batch."""

    number: int
    """Number of its line in the input, from 1."""
    custom_id: str
    body: bytes
    """JSON, of the form of the batch's endpoint."""


class _LineForm(msgspec.Struct, frozen=True, kw_only=True):
    custom_id: str
    method: Literal["POST"]
    url: str
    body: msgspec.Raw


class InputLimits(NamedTuple):
    """How large a batch's input may be."""

    lines: int = 50_000
    """Requests, as of OpenAI's API."""
    line_bytes: int = CALL_BYTES_MOST


USUAL_LIMITS = InputLimits()


class InputFaultsError(Exception):
    """An input that no batch can be made of."""

    def __init__(self, faults: list[BatchFault]) -> None:
        super().__init__(f"{len(faults)} faults")
        self.faults = faults


def batch_lines(path: Path, endpoint: str, limits: InputLimits = USUAL_LIMITS) -> list[BatchLine]:
    """Read a batch's input: one JSON object a line, empty lines left out.

    Whether a body is right is told with its answer, as OpenAI's API does.

    Raises:
        InputFaultsError: A line is not right, an id comes twice, or there are none or too many.
    """
    lines: dict[str, BatchLine] = {}
    faults: list[BatchFault] = []
    for number, text in _numbered_lines(path, limits):
        line = _read_line(number, text, endpoint, limits)
        if isinstance(line, BatchLine) and line.custom_id in lines:
            first_number = lines[line.custom_id].number
            message = f"the custom_id {line.custom_id[:100]!r} is that of line {first_number}, too"
            line = BatchFault("duplicate_custom_id", message, number, "custom_id")
        if isinstance(line, BatchLine):
            lines[line.custom_id] = line
        else:
            faults.append(line)
        if len(faults) >= ERRORS_MOST or len(lines) > limits.lines:
            break
    if len(lines) > limits.lines:
        message = f"a batch has {limits.lines:,} requests at most"
        faults.append(BatchFault("too_many_requests", message, limits.lines + 1))
    elif not lines and not faults:
        faults.append(BatchFault("empty_file", "the file holds no request", 1))
    if faults:
        raise InputFaultsError(faults)
    return [*lines.values()]


def _numbered_lines(path: Path, limits: InputLimits) -> Iterator[tuple[int, bytes]]:
    with path.open("rb") as file:
        number = 0
        # A line that is too long is read no further than to where that is known.
        while text := file.readline(2 * limits.line_bytes):
            number += 1
            if text.strip():
                yield number, text


def _read_line(
    number: int, text: bytes, endpoint: str, limits: InputLimits
) -> BatchLine | BatchFault:
    if len(text) > limits.line_bytes:
        message = f"the line has more than {limits.line_bytes:,} bytes"
        return BatchFault("line_too_long", message, number)
    try:
        form = msgspec.json.decode(text, type=_LineForm)
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        return BatchFault("invalid_json_line", f"the line is not right: {error}", number)
    if form.url != endpoint:
        message = f"url is {form.url[:100]!r} and the batch's endpoint {endpoint!r}"
        return BatchFault("mismatched_url", message, number, "url")
    return BatchLine(number, form.custom_id, bytes(form.body))


def answer_line(line_id: str, custom_id: str, status: int, body: dict[str, Any]) -> bytes:
    """A line of the output, or of the file of errors where ``status`` is not 200."""
    answer = {
        "id": line_id,
        "custom_id": custom_id,
        "response": {"status_code": status, "request_id": line_id, "body": body},
        "error": None if status == 200 else body.get("error"),
    }
    return msgspec.json.encode(answer)


def window_seconds(window: str) -> int | None:
    """Seconds of a completion window such as ``24h``, of 1 h to 30 d; None: it is not right."""
    number, unit = window[:-1], window[-1:]
    hours = {"h": 1, "d": 24}.get(unit)
    if hours is None or not number.isdecimal() or not 0 < int(number) * hours <= 30 * 24:
        return None
    return int(number) * hours * 3600


def has_short_metadata(batch: BatchCreate) -> bool:
    """Whether a batch's own words are within OpenAI's limits."""
    words = batch.metadata or {}
    return len(words) <= 16 and all(
        len(key) <= 64 and len(text) <= 512 for key, text in words.items()
    )

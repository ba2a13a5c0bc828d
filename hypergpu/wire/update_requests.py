"""An update in one HTTP request to the bulk port: its signed offer in a header, bytes, and an
answer that says whether the update is accepted and durable.

`PUT /update` with the serialised `OfferUpdateRequest` in `OFFER_HEADER`, and ``Content-Range`` for
the bytes that it brings. A request without a body asks what is missing. All requests of one attempt
bear the same offer, over as many connections as the node likes; whichever brings the last missing
byte is answered once the update is accepted. See docs/decisions/0046-updates-in-one-request.md.
"""

import base64
import binascii
import re

import msgspec

from hypergpu.errors import HyperGPUError, Reason
from hypergpu.part_file import Span

UPDATE_PATH = "/update"
OFFER_HEADER = "HyperGPU-Offer"
PROTOCOL_HEADER = "HyperGPU-Protocol"
NODE_HEADER = "HyperGPU-Node"
"""Names the node where there is no TLS, which is on loopback only."""
OFFER_BYTES_MAX = 2_560
"""Many times an offer of today. Encoded, it fits into one line of a header."""
ANSWER_TYPE = "application/json"
ANSWER_BYTES_MAX = 64 << 10
_RANGE = re.compile(r"bytes ([0-9]{1,18})-([0-9]{1,18})/(?:\*|[0-9]{1,18})", re.ASCII)


class NumberedRefusal(msgspec.Struct, frozen=True, omit_defaults=True):
    """A numbered error; see `hypergpu.errors`."""

    reason: str
    number: int
    detail: str
    fix: str
    wait_ms: int = 0

    @classmethod
    def of(cls, error: HyperGPUError) -> "NumberedRefusal":
        """The refusal that tells of an error."""
        reason = error.reason
        return cls(reason.name, reason.number, error.detail, error.fix, error.wait_ms)

    def error(self) -> HyperGPUError:
        """The error that it tells of; CALL_BROKEN where this program does not know its reason."""
        reason = Reason.__members__.get(self.reason)
        if reason is None:
            detail = f"{self.number}: {self.detail}"
            return HyperGPUError(Reason.CALL_BROKEN, detail, fix=self.fix)
        return HyperGPUError(reason, self.detail, fix=self.fix, wait_ms=max(0, self.wait_ms))


class UpdateAnswer(msgspec.Struct, frozen=True, omit_defaults=True):
    """Answer to a request; some one part of it is set."""

    is_accepted: bool = False
    """The update is accepted and durable."""
    missing: tuple[Span, ...] = ()
    """Its ranges that have not come, in order."""
    open_epoch: int | None = None
    """Refused: the epoch that was signed for is closed, and this one is open."""
    refusal: NumberedRefusal | None = None

    @property
    def status(self) -> int:
        """Status of HTTP: 200, or of a refusal 503 where trying again later may do, else 422."""
        if self.refusal is None:
            return 200
        reason = Reason.__members__.get(self.refusal.reason)
        return 503 if reason is not None and reason.status == "UNAVAILABLE" else 422


def answer_bytes(answer: UpdateAnswer) -> bytes:
    """Body of a response, as JSON."""
    return msgspec.json.encode(answer)


def refusal_answer(error: HyperGPUError) -> UpdateAnswer:
    """The answer that refuses an update."""
    return UpdateAnswer(refusal=NumberedRefusal.of(error))


def answer_in(body: bytes) -> UpdateAnswer:
    """The answer in a response's body.

    Raises:
        HyperGPUError: The update was refused, with the coordinator's reason; CALL_BROKEN, the body
            is no answer.
    """
    try:
        answer = msgspec.json.decode(body, type=UpdateAnswer)
    except msgspec.MsgspecError:
        detail = "the bulk port answered something that is no answer to an update"
        raise HyperGPUError(Reason.CALL_BROKEN, detail) from None
    if answer.refusal is not None:
        raise answer.refusal.error()
    return answer


def offer_text(offer: bytes) -> str:
    """Value of `OFFER_HEADER`."""
    return base64.b64encode(offer).decode()


def offer_in(text: str) -> bytes | None:
    """The offer in the header; None: it holds none."""
    try:
        offer = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        return None
    return offer if 0 < len(offer) <= OFFER_BYTES_MAX else None


def range_text(span: Span) -> str:
    """Value of ``Content-Range`` for bytes that are sent."""
    return f"bytes {span.start}-{span.end - 1}/*"


def range_in(text: str, size_bytes: int | None) -> Span | None:
    """The range that ``Content-Range`` names; None: none, or not one of so many bytes."""
    match = _RANGE.fullmatch(text)
    if match is None:
        return None
    span = Span(int(match[1]), int(match[2]) + 1)
    return span if size_bytes == span.end - span.start else None

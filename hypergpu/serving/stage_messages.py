"""What stages of a ring are told, and what they answer: packed structs, whose sizes are checked
before they are read. Hidden states in them are sealed by one stage for the next one: see
`hypergpu.rings.frame_cipher`.
"""

from typing import TypeVar

import msgspec

from hypergpu.errors import HyperGPUError, Reason
from hypergpu.rings.frame_cipher import FRAME_EXTRA_BYTES, FramePlace
from hypergpu.rings.ring_members import RingMember
from hypergpu.serving.calls import AnswerPart, ModelCall
from hypergpu.serving.check_messages import (
    CheckReply,
    CheckRequest,
    RecomputeStage,
    TakeAdapterValues,
)
from hypergpu.serving.training_messages import (
    PIECE_BYTES_MOST,
    TrainForward,
    TrainingReply,
    TrainingRequest,
    pieces_of,
)
from hypergpu.units import Bytes

MESSAGE_BYTES_MOST = Bytes(1 << 20)
"""Size of a message at most: what the control stream takes of a call."""
STATES_BYTES_MOST = Bytes(MESSAGE_BYTES_MOST - (1 << 16))
"""Size of the hidden states in it at most."""
SEGMENTS_MOST = 256
_Message = TypeVar("_Message")


class StageSegment(msgspec.Struct, frozen=True, array_like=True):
    """Consecutive tokens of one session in a pass."""

    session: int
    start: int
    """Position of the first one."""
    count: int
    judged: int = 0
    """How many of the last rows the last stage judges; 0: none."""
    drafted: tuple[int, ...] = ()
    """To the last stage: tokens behind the newest known one, which may be wrong."""


class ComputePass(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Compute a pass. Exactly one of ``tokens`` and ``states`` is there."""

    segments: tuple[StageSegment, ...]
    tokens: tuple[int, ...] = ()
    """To the first stage: of all segments."""
    states: bytes = b""
    """To the others: rows of all segments, as the ring's codec writes them; sealed on the way."""
    wants_output: bool = True
    """False: only keys are wanted."""
    number: int = 0
    """Number of the pass; 0: ``states`` are given again for a stage that was lost."""

    @property
    def rows(self) -> int:
        """Tokens of all segments."""
        return sum(segment.count for segment in self.segments)

    @property
    def place(self) -> FramePlace:
        """Where hidden states of the pass belong: those that it takes, and those that it gives."""
        rows = [(each.session, each.start, each.count) for each in self.segments]
        return FramePlace(self.number, rows)

    def check(self) -> None:
        """Check what does not follow from types.

        Raises:
            HyperGPUError: REQUEST_INVALID, with what is wrong.
        """
        faults = (
            (not 0 < len(self.segments) <= SEGMENTS_MOST, f"1 to {SEGMENTS_MOST} segments"),
            (bool(self.tokens) == bool(self.states), "either tokens or states"),
            (bool(self.tokens) and len(self.tokens) != self.rows, "a token for each row"),
            (any(map(_is_wrong, self.segments)), "places from 0 on, and rows that it has"),
        )
        for is_wrong, rule in faults:
            if is_wrong:
                raise HyperGPUError(Reason.REQUEST_INVALID, f"a pass has {rule}")


def _is_wrong(segment: StageSegment) -> bool:
    has_places = segment.start >= 0 and segment.count > 0
    has_rows = 0 <= segment.judged <= segment.count
    return not (has_places and has_rows and len(segment.drafted) <= max(0, segment.judged - 1))


class BeginAnswer(msgspec.Struct, frozen=True, tag=True):
    """To the last stage: a call is to be answered, with the tokens that are out already."""

    session: int
    call: ModelCall


class ReplayRows(msgspec.Struct, frozen=True, tag=True):
    """Give hidden states once more that were given of a session."""

    session: int
    start: int
    count: int

    @property
    def place(self) -> FramePlace:
        """Where these states belong."""
        return FramePlace(0, [(self.session, self.start, self.count)])


class ForgetSession(msgspec.Struct, frozen=True, tag=True):
    """A session is over."""

    session: int


class JoinRing(msgspec.Struct, frozen=True, tag=True):
    """The stage's place in a ring, which is formed anew when a member changes."""

    epoch: int
    place: int
    """Its own place among the members, from 0."""
    members: tuple[RingMember, ...]
    """All stages, in the order of the ring."""


StageRequest = (
    ComputePass
    | BeginAnswer
    | ReplayRows
    | ForgetSession
    | JoinRing
    | CheckRequest
    | TrainingRequest
)


class StageReady(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """The stage holds its layers."""

    tokens_most: int
    """Tokens of a session at most."""
    fingerprint: str
    device: str
    pass_us: float
    """Time of a pass beside its tokens, measured when it was loaded."""
    token_us: float
    layer_us: float
    """Time of one token in one layer."""
    weights_bytes: int
    token_bytes: int
    """Keys and values of one token."""
    sessions_bytes: int
    """Memory for keys and values of all sessions."""
    key: bytes = b""
    """Public key for hidden states: see `hypergpu.rings.ring_members`."""
    key_signature: bytes = b""
    """The node's over it."""
    takes_adapters: bool = False
    """Whether it computes stages of rings that trained again, which takes their adapters."""


class StageRows(msgspec.Struct, frozen=True, tag=True):
    """Hidden states of a pass, or of a replay, sealed for the next stage; empty: keys alone were
    wanted, or it has none.
    """

    states: bytes = b""


class JudgedSegment(msgspec.Struct, frozen=True, array_like=True):
    """What the last stage gives of one session of a pass."""

    session: int
    tokens: tuple[int, ...]
    parts: "tuple[AnswerPart, ...]"
    """For the caller; one for each token, and the end if the answer is over."""


class StageJudged(msgspec.Struct, frozen=True, tag=True):
    """The last stage has computed a pass."""

    segments: tuple[JudgedSegment, ...]


class AnswerOpened(msgspec.Struct, frozen=True, tag=True):
    """The last stage knows a call: the tokens of its prompt."""

    tokens: tuple[int, ...]


class StageRefused(msgspec.Struct, frozen=True, tag=True):
    """A call or a pass cannot be computed."""

    reason: str
    is_lasting: bool = True
    """Whether another holder of the layers would refuse it, too."""
    is_too_long: bool = False
    blames_input: bool = False
    """Whether hidden states of the stage before are wrong."""


class RingJoined(msgspec.Struct, frozen=True, tag=True):
    """The stage has checked who is in the ring, and takes its place."""


StageReply = (
    StageReady
    | StageRows
    | StageJudged
    | AnswerOpened
    | StageRefused
    | RingJoined
    | CheckReply
    | TrainingReply
)
_encoder = msgspec.msgpack.Encoder()
_requests: msgspec.msgpack.Decoder[StageRequest] = msgspec.msgpack.Decoder(StageRequest)
_replies: msgspec.msgpack.Decoder[StageReply] = msgspec.msgpack.Decoder(StageReply)


def frame_bytes_most(rows: int, row_bytes: int) -> Bytes:
    """Size of the sealed states of so many rows at most."""
    return Bytes(rows * row_bytes + FRAME_EXTRA_BYTES)


def pack_stage_message(message: StageRequest | StageReply) -> bytes:
    """The bytes of a message.

    Raises:
        HyperGPUError: REQUEST_INVALID, it is too large.
    """
    body = _encoder.encode(message)
    _check_size(body)
    return body


def stage_message_parts(message: StageRequest | StageReply) -> list[bytes]:
    """The bytes of a message of a ring that trains, in as many messages as they need."""
    body = _encoder.encode(message)
    if len(body) <= PIECE_BYTES_MOST:
        return [body]
    return [_encoder.encode(piece) for piece in pieces_of(body)]


def unpack_stage_request(body: bytes, *, is_joined: bool = False) -> StageRequest:
    """Read what a stage is told.

    Args:
        body: As it came.
        is_joined: Whether it was joined of pieces, which bound its size.

    Raises:
        HyperGPUError: REQUEST_INVALID, it is too large, malformed or out of its limits.
    """
    request = _unpack(body, _requests, is_joined=is_joined)
    if isinstance(request, ComputePass | TrainForward):
        request.check()
    if isinstance(request, BeginAnswer):
        request.call.check()
    if isinstance(request, RecomputeStage | TakeAdapterValues):
        request.check_limits()
    return request


def unpack_stage_reply(body: bytes, *, is_joined: bool = False) -> StageReply:
    """Read what a stage answers.

    Raises:
        HyperGPUError: REQUEST_INVALID, it is too large or malformed.
    """
    return _unpack(body, _replies, is_joined=is_joined)


def _unpack(
    body: bytes, decoder: "msgspec.msgpack.Decoder[_Message]", *, is_joined: bool
) -> _Message:
    if not is_joined:
        _check_size(body)
    try:
        return decoder.decode(body)
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        detail = f"a message of a ring is malformed: {error}"
        raise HyperGPUError(Reason.REQUEST_INVALID, detail) from error


def _check_size(body: bytes) -> None:
    if len(body) > MESSAGE_BYTES_MOST:
        detail = f"a message of a ring has {len(body):,} bytes, and {MESSAGE_BYTES_MOST:,} at most"
        raise HyperGPUError(Reason.REQUEST_INVALID, detail)

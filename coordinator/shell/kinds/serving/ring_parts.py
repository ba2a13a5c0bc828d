"""Stages, calls and messages as the driver of a ring has them."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from msgspec.structs import replace

from coordinator.core.rings.ring_events import SendPass, SessionResult
from coordinator.core.rings.ring_state import Ring
from coordinator.core.serving.events import StageChecked, StagesContradicted
from coordinator.core.serving.state import ServeJob
from coordinator.shell.kinds.serving.token_counter import CountWindow
from coordinator.shell.nodes.control_stream import ControlStream
from hypergpu.ids import JobId, NodeId
from hypergpu.rings.layer_span import LayerSpan
from hypergpu.rings.ring_members import RingMember, key_fault
from hypergpu.serving.calls import AnswerEnded, AnswerPart, AnswerToken, ModelCall, ReplicaReady
from hypergpu.serving.stage_messages import (
    ComputePass,
    ForgetSession,
    JoinRing,
    RingJoined,
    StageJudged,
    StageReady,
    StageRefused,
    StageReply,
    StageRequest,
    StageSegment,
)

StageEvent = StageChecked | StagesContradicted


class RingPorts(NamedTuple):
    """What a ring reports to."""

    deliver: Callable[[int, list[AnswerPart], bool], None]
    """Takes parts of a call's answer; true: it is over."""
    note_ready: Callable[[ReplicaReady], None]
    """Called when all stages are there for the first time."""
    end: Callable[[str], None]
    """Called with the reason when the ring is no more: its conversations go on in the next one."""
    report_fault: Callable[["StageFault"], None]
    """Takes the lease of a stage back."""
    note_stages: Callable[[], None]
    """Called when a stage came or went."""
    checks: "CheckPorts"
    """For whoever has conversations computed again."""
    layer_us: dict[NodeId, float]
    """Times of a layer that nodes have measured, of all rings of a model."""


class CheckPorts(NamedTuple):
    """What checks of a ring need of its model."""

    job: Callable[[], ServeJob]
    report: Callable[[StageEvent], None]
    """Has what nodes say of a stage decided on."""
    window_of: Callable[[NodeId], CountWindow | None]
    """The window in which a stage's tokens are counted now; None: none are."""
    adapter_values: Callable[[int], bytes]
    """Trained values of a layer's adapter in the newest stored round. Blocks."""


class StageFault(NamedTuple):
    """Why a node must not hold its layers any longer."""

    node: NodeId
    lease: int
    reason: str
    is_lasting: bool = False
    """Whether the same node would fail again."""
    is_absent: bool = False
    """Whether it does nothing wrong, but has not the layers in its memory now."""


class StageSeat(NamedTuple):
    """A node that holds a stage."""

    node: NodeId
    lease: int
    span: LayerSpan
    stream: ControlStream
    ready: StageReady

    @property
    def member(self) -> RingMember:
        """The node as the other stages are told of it."""
        key, signature = self.ready.key, self.ready.key_signature
        return RingMember(self.node, self.lease, self.span, key, signature)

    @property
    def upload_bits_per_s(self) -> int:
        """Limit that the node's owner sets on what it sends; 0: none."""
        return self.stream.capabilities.caps.get("upload_bits_per_s", 0)


_UPDATE = "Fix there: pip install --upgrade hypergpu"
_UNSEALED = f"its version seals no hidden states between stages. {_UPDATE}"


class PendingRequest(NamedTuple):
    """What a stage was told and has not answered."""

    stage: int
    request: StageRequest
    epoch: int
    number: int = 0
    """Number of the pass."""
    sent_ms: int = 0
    upload_bits_per_s: int = 0
    """Limit of the stage's owner; 0: none."""


class RingCall:
    """A conversation that a ring answers."""

    def __init__(self, call: ModelCall) -> None:
        self.call = call
        self.prompt_tokens = 0
        self.has_begun = False
        self.epoch = 0
        """Epoch of the ring in which it began."""


class RelayedStates:
    """Sealed states on their way from one stage to the next."""

    def __init__(self) -> None:
        self.passed: dict[int, bytes] = {}
        """By the pass that takes them on."""
        self.replayed: dict[int, bytes] = {}
        """By the session that is repaired."""

    def take(self, send: SendPass) -> bytes:
        """Those that a stage is sent; the first one is sent none."""
        if not send.stage:
            return b""
        if send.is_repair:
            return self.replayed.pop(send.segments[0].session)
        return self.passed.pop(send.number)

    def clear(self) -> None:
        """Forget all."""
        self.passed.clear()
        self.replayed.clear()


def continuation(session: int, ring_call: RingCall, ring: Ring | None) -> ModelCall:
    """A call with the tokens that are out."""
    ring_session = ring.sessions.get(session) if ring is not None else None
    if ring_session is None:
        return ring_call.call
    return replace(ring_call.call, tokens_out=ring_session.tokens[ring_call.prompt_tokens :])


def seal_fault(job_id: JobId, seat: StageSeat) -> str:
    """Why a stage cannot be in a ring whose states are sealed; empty: it can."""
    return key_fault(job_id, seat.member) if seat.ready.key else _UNSEALED


def has_memory(seats: Sequence[StageSeat], calls: Sequence[RingCall]) -> bool:
    """Whether keys of these conversations, at their longest, fit into every stage."""
    limit = min((seat.ready.tokens_most for seat in seats), default=0)
    tokens = 0
    for each in calls:
        new_tokens = each.call.new_tokens_most
        tokens += limit if new_tokens is None else min(limit, each.prompt_tokens + new_tokens)
    return all(tokens * each.ready.token_bytes <= each.ready.sessions_bytes for each in seats)


def ring_readiness(readies: Sequence[StageReady], dtype: str) -> ReplicaReady:
    """What a ring of these stages, in order, is to its callers."""
    is_exact = dtype == "float32" and all(ready.device == "cpu" for ready in readies)
    return ReplicaReady(
        tokens_most=min(ready.tokens_most for ready in readies),
        fingerprint=readies[-1].fingerprint,
        device=readies[-1].device,
        continuation="identical" if is_exact else "similar",
        weights_bytes=sum(ready.weights_bytes for ready in readies),
        token_bytes=sum(ready.token_bytes for ready in readies),
    )


def pass_request(send: SendPass, states: bytes, *, is_last: bool) -> ComputePass:
    """A pass as a stage is told of it.

    Args:
        send: The machine's command.
        states: Sealed states that the stage takes; the first one takes tokens.
        is_last: Whether the stage is the last one, which judges tokens.
    """
    judges = is_last and not send.is_repair
    segments = []
    for each in send.segments:
        judged_count = each.judged if judges else 0
        draft = each.tokens[len(each.tokens) - judged_count + 1 :] if judged_count else ()
        count = len(each.tokens)
        segments.append(StageSegment(each.session, each.start, count, judged_count, draft))
    tokens = () if send.stage else tuple(token for each in send.segments for token in each.tokens)
    return ComputePass(
        segments=tuple(segments),
        tokens=tokens,
        states=states,
        wants_output=not send.is_repair,
        number=0 if send.is_repair else send.number,
    )


def session_results(reply: StageJudged) -> tuple[SessionResult, ...] | None:
    """What the last stage says of each session; None: its tokens are not those of its parts."""
    results = []
    for segment in reply.segments:
        tokens = tuple(part.token for part in segment.parts if isinstance(part, AnswerToken))
        if not segment.parts or tokens != segment.tokens:
            return None
        has_ended = isinstance(segment.parts[-1], AnswerEnded)
        results.append(SessionResult(segment.session, tokens, has_ended))
    return tuple(results)


def membership_fault(request: JoinRing | ForgetSession, reply: StageReply) -> str:
    """Why an answer to a ring's members is a fault; empty: it is none."""
    if isinstance(request, ForgetSession) or isinstance(reply, RingJoined):
        return ""
    reason = reply.reason if isinstance(reply, StageRefused) else type(reply).__name__
    return f"it does not join the ring: {reason}"

"""Stages, calls and messages as the driver of a ring has them."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from coordinator.core.rings.ring_events import SendPass, SessionResult
from coordinator.core.serving.state import ServeJob
from coordinator.shell.nodes.control_stream import ControlStream
from hypergpu.ids import NodeId
from hypergpu.rings.layer_span import LayerSpan
from hypergpu.rings.ring_members import RingMember, key_fault
from hypergpu.rings.stage_work import STAGE_KIND
from hypergpu.serving.calls import AnswerEnded, AnswerPart, AnswerToken, ModelCall, ReplicaReady
from hypergpu.serving.serve_request import engine_versions
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
_UNSEALED_TRAINING = f"its version seals nothing of a training between stages. {_UPDATE}"


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


def seal_fault(job: ServeJob, seat: StageSeat) -> str:
    """Why a stage cannot be in a job's ring, whose states are sealed; empty: it can."""
    if not seat.ready.key:
        return _UNSEALED
    version = seat.stream.capabilities.workloads.get(STAGE_KIND)
    if job.is_training and version not in engine_versions(STAGE_KIND, is_training=True):
        return _UNSEALED_TRAINING
    return key_fault(job.job_id, seat.member)


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

"""Translation of the wire into values, in this module alone."""

import json
import math

import msgspec

from hypergpu.client.values import (
    EstimateView,
    JobDetail,
    JobEvent,
    JobUpdate,
    JobView,
    ModelChunk,
    ModelHeader,
    NodeView,
    ParticipantView,
    ReadingView,
    RoundProgress,
    TokenView,
)
from hypergpu.digest import digest_from_wire, digest_to_wire
from hypergpu.errors import HyperGPUError, Reason
from hypergpu.ids import Digest
from hypergpu.tensors.layout import LayoutError, layout_from_json
from hypergpu.v1 import job_pb2, tensor_pb2
from hypergpu.wire.token import Role

ROLES = {
    Role.NODE: job_pb2.TOKEN_ROLE_NODE,
    Role.USER: job_pb2.TOKEN_ROLE_USER,
    Role.OPERATOR: job_pb2.TOKEN_ROLE_OPERATOR,
}
_ROLE_NAMES = {number: role.value for role, number in ROLES.items()}


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _hex(digest: tensor_pb2.Digest) -> str | None:
    return digest.value.hex() or None


def job_view(job: job_pb2.JobSummary) -> JobView:
    """A job from the wire."""
    return JobView(
        id=job.job_id,
        name=job.name,
        phase=job.phase,
        reason=job.reason,
        round=job.round,
        rounds=job.rounds,
        nodes=job.nodes,
        loss=_finite(job.loss),
        metric=_finite(job.metric),
        metric_name=job.metric_name,
        bytes_up=job.bytes_up,
        bytes_down=job.bytes_down,
        updates_accepted=job.updates_accepted,
        updates_refused=job.updates_refused,
        samples=job.samples,
        model=_hex(job.model),
        at_ms=job.at_ms,
    )


def participant_view(participant: job_pb2.ParticipantSummary) -> ParticipantView:
    """A participant from the wire."""
    return ParticipantView(
        node=participant.node_id,
        slot=participant.slot,
        state=participant.state,
        steps_done=participant.steps_done,
        steps_total=participant.steps_total,
        loss=_finite(participant.loss),
        reason=participant.reason,
        name=participant.name,
    )


def job_detail(found: job_pb2.GetJobResponse) -> JobDetail:
    """`job show` from the wire."""
    return JobDetail(
        job=job_view(found.job),
        spec=msgspec.json.decode(found.spec_json or "{}", type=dict[str, object]),
        participants=[participant_view(each) for each in found.participants],
        model_bytes=found.model.blob.size_bytes,
    )


def node_view(node: job_pb2.NodeSummary) -> NodeView:
    """A node from the wire."""
    able = node.capabilities
    return NodeView(
        id=node.node_id,
        state=node.state,
        reason=node.reason,
        device=able.device,
        device_name=able.device_name,
        memory_bytes=able.memory_bytes,
        worker=able.worker,
        workloads={each.name: each.version for each in able.workloads},
        job=node.job_id or None,
        last_seen_ms_ago=node.last_seen_ms_ago,
        software=node.software,
        updates_accepted=node.updates_accepted,
        updates_refused=node.updates_refused,
        reading=reading_view(node.reading),
        health=node.health if node.health_reason else None,
        health_reason=node.health_reason,
        name=able.name,
    )


def token_view(token: job_pb2.TokenSummary) -> TokenView:
    """A token from the wire."""
    return TokenView(
        id=token.token_id,
        role=_ROLE_NAMES.get(token.role, "unknown"),
        label=token.label,
        expires_in_s=token.expires_in_s if token.expires_in_s or token.is_expired else None,
        uses_left=None if token.is_unlimited else token.uses_left,
        is_revoked=token.is_revoked,
    )


def job_event(event: job_pb2.JobEvent) -> JobEvent:
    """An event from the wire."""
    return JobEvent(
        sequence=event.sequence, at_ms=event.at_ms, kind=event.kind, body=event_body(event)
    )


def reading_view(reading: job_pb2.Reading) -> ReadingView:
    """A reading from the wire."""
    return ReadingView(
        round_trip_us=_estimate(reading.round_trip_us),
        least_round_trip_us=reading.least_round_trip_us or None,
        loss=_estimate(reading.loss),
        up_bits_per_s=_estimate(reading.up_bits_per_s),
        down_bits_per_s=_estimate(reading.down_bits_per_s),
        step_us=_estimate(reading.step_us),
        congestion_control=reading.congestion_control or None,
    )


def _estimate(estimate: job_pb2.Estimate) -> EstimateView | None:
    if not estimate.samples and not estimate.mean:
        return None
    return EstimateView(estimate.mean, estimate.spread, estimate.samples, estimate.age_ms)


def event_body(event: job_pb2.JobEvent) -> dict[str, object]:
    """Fields of an event."""
    fields = json.loads(event.body_json or "{}")
    return fields if isinstance(fields, dict) else {}


def job_update(message: job_pb2.WatchJobResponse) -> JobUpdate:
    """A message of a watched job."""
    if message.HasField("event"):
        return job_event(message.event)
    return RoundProgress(tuple(participant_view(each) for each in message.progress.participants))


def blob_ref(digest: Digest, size_bytes: int) -> tensor_pb2.BlobRef:
    """Name of a blob on the wire."""
    wire = tensor_pb2.Digest(value=digest_to_wire(digest))
    return tensor_pb2.BlobRef(digest=wire, size_bytes=size_bytes)


def model_part(message: job_pb2.ExportModelResponse) -> ModelHeader | ModelChunk:
    """A message of an exported model.

    Raises:
        HyperGPUError: CALL_BROKEN, the header contradicts itself.
    """
    if message.HasField("chunk"):
        return ModelChunk(message.chunk.offset, message.chunk.payload)
    header = message.header
    try:
        layout = layout_from_json(header.layout_json)
    except LayoutError as broken:
        raise HyperGPUError(Reason.CALL_BROKEN, f"the model's layout: {broken}") from broken
    if layout.model_bytes != header.blob.size_bytes:
        detail = f"a model of {header.blob.size_bytes} bytes with a layout of {layout.model_bytes}"
        raise HyperGPUError(Reason.CALL_BROKEN, detail)
    digest = digest_from_wire(header.blob.digest.value)
    return ModelHeader(digest, header.blob.size_bytes, layout, header.model_card)

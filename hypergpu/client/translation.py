"""Translation of the wire into values, in this module alone."""

import json
import math
from typing import TypeVar

import msgspec
from google.protobuf.message import Message

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
View = TypeVar("View", bound=msgspec.Struct)
_ROLE_NAMES = {number: role.value for role, number in ROLES.items()}


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _hex(digest: tensor_pb2.Digest) -> str | None:
    return digest.value.hex() or None


def _view(kind: type[View], message: Message, **given: object) -> View:
    """A value of fields named like the message's, but for those that are given."""
    names = set(kind.__struct_fields__) - given.keys()
    return kind(**{name: getattr(message, name) for name in names}, **given)


def job_view(job: job_pb2.JobSummary) -> JobView:
    """A job from the wire."""
    return _view(
        JobView,
        job,
        id=job.job_id,
        loss=_finite(job.loss),
        metric=_finite(job.metric),
        model=_hex(job.model),
    )


def participant_view(participant: job_pb2.ParticipantSummary) -> ParticipantView:
    """A participant from the wire."""
    loss = _finite(participant.loss)
    return _view(ParticipantView, participant, node=participant.node_id, loss=loss)


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
    return _view(
        NodeView,
        node,
        id=node.node_id,
        name=able.name,
        device=able.device,
        device_name=able.device_name,
        memory_bytes=able.memory_bytes,
        worker=able.worker,
        workloads={each.name: each.version for each in able.workloads},
        job=node.job_id or None,
        reading=reading_view(node.reading),
        health=node.health or None,
    )


def token_view(token: job_pb2.TokenSummary) -> TokenView:
    """A token from the wire."""
    return _view(
        TokenView,
        token,
        id=token.token_id,
        role=_ROLE_NAMES.get(token.role, "unknown"),
        expires_in_s=token.expires_in_s if token.expires_in_s or token.is_expired else None,
        uses_left=None if token.is_unlimited else token.uses_left,
    )


def job_event(event: job_pb2.JobEvent) -> JobEvent:
    """An event from the wire."""
    return _view(JobEvent, event, body=event_body(event))


def reading_view(reading: job_pb2.Reading) -> ReadingView:
    """A reading from the wire."""
    found = {
        name: _view(EstimateView, estimate) if estimate.samples or estimate.mean else None
        for name in ("round_trip_us", "loss", "up_bits_per_s", "down_bits_per_s", "step_us")
        for estimate in [getattr(reading, name)]
    }
    least_us = reading.least_round_trip_us or None
    control = reading.congestion_control or None
    return ReadingView(**found, least_round_trip_us=least_us, congestion_control=control)


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

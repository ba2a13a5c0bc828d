"""Between protobuf and the core's values: the only place where both are known. What a node
reports is bounded and clamped here.
"""

import math
from collections.abc import Iterator, Mapping
from contextlib import suppress

import msgspec

from coordinator.core.hub.health import Exclusion, HealthHistory, HealthParts, health_reason
from coordinator.core.network.line import is_loss_inferred, loss_share
from coordinator.core.network.reading import (
    Estimate,
    NodeReading,
    Observation,
    PacketTrain,
    RoundTrip,
    SocketReport,
    TransferDirection,
    TransferTime,
)
from coordinator.core.training.job.commands import CancelShard
from coordinator.core.training.job.state import Job, ModelScore, Participant
from coordinator.core.training.plan.decision import MemoryUse
from coordinator.core.work.kind import WorkKind
from coordinator.core.work.leases import WorkState
from coordinator.core.work.members import LeasedJob
from coordinator.core.work.node_fit import NodeFeatures
from coordinator.shell.store.journal.records import Entry, TokenRecord
from hypergpu.assignment import Lease
from hypergpu.device_shares import WHOLE_DEVICE_PERMILLE
from hypergpu.errors import HyperGPUError, Reason
from hypergpu.goodput import SMALLEST_BYTES
from hypergpu.ids import Digest, JobId, NodeId, is_data_name
from hypergpu.jobfile.requirements import LABELS_MOST, RequirementError, parse_label
from hypergpu.journal.events import public_body
from hypergpu.optimizer import FIRST_OPTIMIZERS, OPTIMIZERS
from hypergpu.phases import WorkPhase
from hypergpu.programs.operators import OPERATORS
from hypergpu.units import Bytes, Microseconds, Milliseconds
from hypergpu.v1 import job_pb2, measurement_pb2, node_pb2
from hypergpu.wire.credentials import Role
from hypergpu.wire.datagrams import PACKETS_MAX
from hypergpu.wire.messages import digest_message, lease_message, phase_value

_LABEL_LENGTH_MAX = 200
_SANDBOX_LENGTH_MAX = 500
_CAPABILITIES_BYTES_MAX = 8_192
"""Limit for one node; a page of 100 nodes then stays below gRPC\'s 4 MiB."""
_ROLES = {
    Role.NODE: job_pb2.TOKEN_ROLE_NODE,
    Role.VIEWER: job_pb2.TOKEN_ROLE_VIEWER,
    Role.USER: job_pb2.TOKEN_ROLE_USER,
    Role.OPERATOR: job_pb2.TOKEN_ROLE_OPERATOR,
}


class Capabilities(msgspec.Struct, frozen=True):
    """What a node can do, as it says."""

    device: str = ""
    device_name: str = ""
    memory_bytes: int = 0
    worker: str = ""
    workloads: Mapping[str, int] = {}
    name: str = ""
    caps: Mapping[str, int] = {}
    """The owner's limits by their names on the wire; those that are not set are left out."""
    sandbox: str = ""
    """Sandbox of the node's worker, for people."""
    labels: Mapping[str, str] = {}
    """Labels that its owner gave it."""
    processors: int = 0
    machine_memory_bytes: int = 0
    """Memory of the machine; 0: it tells none, and no processors."""
    data_names: frozenset[str] = frozenset()
    """Data sets that its owner has named a folder for."""
    torch: str = ""
    """Version of its worker's torch; empty: it has none."""
    lacking_operators: frozenset[str] = frozenset()
    """Operators of programs that this has not."""
    optimizers: frozenset[str] = FIRST_OPTIMIZERS
    """Inner optimizers that it has."""
    share_permille: int = WHOLE_DEVICE_PERMILLE
    """Share of its device that it has, beside other nodes of it."""
    holds_experts: bool = False
    """Whether it trains mixtures of which it holds some experts only."""

    def features(self, software: str) -> NodeFeatures:
        """What jobs may require: properties, and labels, none of which hides a property."""
        cap = self.caps.get("worker_memory_bytes", 0)
        is_gpu = self.device not in ("", "cpu")
        gpu_bytes = min(self.memory_bytes, cap or self.memory_bytes) if is_gpu else 0
        features: dict[str, str | int] = {
            **self.labels,
            "device": self.device,
            "gpu": gpu_bytes,
            "worker": self.worker,
            "software": software,
        }
        if self.processors:
            features["cores"] = self.processors
        if whole := self.machine_memory_bytes:
            features["memory"] = min(whole, cap or whole)
        return features


class NodeProgress(msgspec.Struct, frozen=True):
    """How far a participant is, for people. Only the newest is kept."""

    job_id: JobId
    round: int
    lease: int
    steps_done: int
    steps_total: int
    loss: float
    phase: WorkPhase | None = None


def cancel_message(job_id: JobId, command: CancelShard) -> node_pb2.ControlResponse:
    """A void lease."""
    lease = lease_message(Lease(job_id, command.round, command.lease))
    return node_pb2.ControlResponse(cancel=node_pb2.Cancel(lease=lease, reason=command.reason))


def release_message(job_id: JobId, reason: str) -> node_pb2.ControlResponse:
    """The end of a node's part in a job."""
    return node_pb2.ControlResponse(release=node_pb2.Release(job_id=job_id, reason=reason))


def finite(value: float) -> float | None:
    """A loss for the journal, which holds no NaN."""
    return value if math.isfinite(value) else None


def capabilities_value(message: node_pb2.Capabilities) -> Capabilities:
    """What a node says it can do.

    Raises:
        HyperGPUError: REQUEST_INVALID, it is larger than lists of nodes can carry.
    """
    if message.ByteSize() > _CAPABILITIES_BYTES_MAX:
        detail = (
            f"capabilities are at most {_CAPABILITIES_BYTES_MAX} bytes, not {message.ByteSize()}"
        )
        raise HyperGPUError(Reason.REQUEST_INVALID, detail)
    return Capabilities(
        device=message.device[:_LABEL_LENGTH_MAX],
        device_name=message.device_name[:_LABEL_LENGTH_MAX],
        memory_bytes=message.memory_bytes,
        worker=message.worker[:_LABEL_LENGTH_MAX],
        workloads={
            workload.name[:_LABEL_LENGTH_MAX]: workload.version for workload in message.workloads
        },
        # It is shown on terminals, where control characters would act.
        name="".join(each for each in message.name[:_LABEL_LENGTH_MAX] if each.isprintable()),
        caps={field.name: value for field, value in message.caps.ListFields()},
        sandbox="".join(
            each for each in message.sandbox[:_SANDBOX_LENGTH_MAX] if each.isprintable()
        ),
        labels=_labels_value(message),
        processors=message.processors,
        machine_memory_bytes=message.machine_memory_bytes,
        data_names=frozenset(filter(is_data_name, message.data_names)),
        torch="".join(each for each in message.torch[:_LABEL_LENGTH_MAX] if each.isprintable()),
        lacking_operators=OPERATORS.intersection(message.lacking_operators),
        optimizers=FIRST_OPTIMIZERS.union(set(OPTIMIZERS).intersection(message.optimizers)),
        holds_experts=message.holds_experts,
        share_permille=min(message.share_permille, WHOLE_DEVICE_PERMILLE) or WHOLE_DEVICE_PERMILLE,
    )


def capabilities_message(capabilities: Capabilities) -> node_pb2.Capabilities:
    """What a node said it can do, told to an operator."""
    return node_pb2.Capabilities(
        device=capabilities.device,
        device_name=capabilities.device_name,
        memory_bytes=capabilities.memory_bytes,
        worker=capabilities.worker,
        workloads=[
            node_pb2.WorkloadVersion(name=name, version=version)
            for name, version in capabilities.workloads.items()
        ],
        name=capabilities.name,
        caps=node_pb2.Caps(**capabilities.caps),
        sandbox=capabilities.sandbox,
        labels=capabilities.labels,
        processors=capabilities.processors,
        machine_memory_bytes=capabilities.machine_memory_bytes,
        data_names=sorted(capabilities.data_names),
        torch=capabilities.torch,
        lacking_operators=sorted(capabilities.lacking_operators),
        optimizers=sorted(capabilities.optimizers),
        holds_experts=capabilities.holds_experts,
    )


def _labels_value(message: node_pb2.Capabilities) -> dict[str, str]:
    """The labels of a node, without those that are none."""
    labels: dict[str, str] = {}
    for name, value in list(message.labels.items())[:LABELS_MOST]:
        with suppress(RequirementError):
            labels.update([parse_label(f"{name}={value}")])
    return labels


def progress_value(message: node_pb2.Progress) -> NodeProgress:
    """How far a participant says it is."""
    return NodeProgress(
        job_id=JobId(message.lease.job_id),
        round=message.lease.round,
        lease=message.lease.number,
        steps_done=message.steps_done,
        steps_total=message.steps_total,
        loss=message.loss,
        phase=phase_value(message.phase),
    )


def event_message(entry: Entry) -> job_pb2.JobEvent:
    """A journal row as the public sees it."""
    body = public_body(entry.kind, entry.body_json).decode()
    return job_pb2.JobEvent(
        sequence=entry.sequence, at_ms=entry.at_ms, kind=entry.kind, body_json=body
    )


def job_summary(job: Job, now_ms: Milliseconds) -> job_pb2.JobSummary:
    """One line about a job."""
    score = job.score or ModelScore(0, Digest(""), math.nan, math.nan)
    message = job_pb2.JobSummary(
        job_id=job.job_id,
        name=job.spec.name,
        phase=job.phase.value,
        reason=job.reason,
        round=job.model.round if job.model else 0,
        rounds=job.spec.training.rounds,
        nodes=sum(member.is_present for member in job.members.values()),
        loss=score.loss,
        metric=score.metric,
        metric_name=score.metric_name,
        metrics=score.metrics,
        evaluated_samples=score.samples,
        bytes_up=job.tally.bytes_up,
        bytes_down=job.tally.bytes_down,
        updates_accepted=job.tally.updates_accepted,
        updates_rejected=job.tally.updates_rejected,
        samples=job.tally.samples,
        planned_samples=job.spec.stated_samples if job.spec.strategy == "aware" else 0,
        at_ms=now_ms,
        owner=job.owner,
    )
    if job.model is not None:
        message.model.CopyFrom(digest_message(job.model.blob.digest))
    return message


def work_summary(machine: WorkKind, job: LeasedJob, now_ms: Milliseconds) -> job_pb2.JobSummary:
    """One line about a job of a kind other than training."""
    return job_pb2.JobSummary(
        job_id=job.job_id,
        name=machine.name,
        phase=machine.phase_name(job),
        reason=job.reason,
        nodes=sum(member.is_present for member in job.members.values()),
        loss=math.nan,
        metric=math.nan,
        at_ms=now_ms,
        owner=job.owner,
    )


def resting_summary(job_id: JobId, why: str) -> job_pb2.JobSummary:
    """One line about a job that this version cannot read."""
    reason = f"journalled by another version: {why}"
    return job_pb2.JobSummary(
        job_id=job_id, phase="unreadable", reason=reason, loss=math.nan, metric=math.nan
    )


def participant_summary(
    node: NodeId, participant: Participant, progress: NodeProgress | None
) -> job_pb2.ParticipantSummary:
    """One line about a participant, with its progress when that belongs to its lease."""
    message = job_pb2.ParticipantSummary(
        node_id=node,
        slot=participant.slot,
        state=participant.work.value,
        steps_total=participant.inner_steps,
        loss=math.nan,
        reason=participant.reason or participant.plan.reason,
    )
    if participant.work is WorkState.RECEIVED:
        message.steps_done = participant.inner_steps
        loss = participant.update.loss_last if participant.update else None
        message.loss = math.nan if loss is None else loss
    elif progress is not None and progress.lease == participant.lease:
        message.steps_done = progress.steps_done
        message.loss = progress.loss
        if progress.phase is not None and participant.is_open:
            message.phase = progress.phase.value
    return message


def memory_use(report: node_pb2.TrainingReport) -> MemoryUse | None:
    """What a node measured of its memory; None: it did not."""
    if not report.memory_peak_bytes:
        return None
    return MemoryUse(Bytes(report.memory_before_bytes), Bytes(report.memory_peak_bytes))


def role_value(role: int) -> Role | None:
    """A token's role off the wire; None when it is none that exists."""
    return next((each_role for each_role, number in _ROLES.items() if number == role), None)


def token_summary(record: TokenRecord, now_s: int) -> job_pb2.TokenSummary:
    """One line about a token."""
    return job_pb2.TokenSummary(
        token_id=record.token_id,
        role=_ROLES[record.role],
        label=record.label,
        expires_in_s=max(0, record.expires_s - now_s) if record.expires_s else 0,
        uses_left=record.uses_left or 0,
        is_unlimited=record.uses_left is None,
        is_revoked=record.is_revoked,
        is_expired=0 < record.expires_s <= now_s,
    )


ROUND_TRIPS_MAX = 64
TRAINS_MAX = 16
TRANSFERS_MAX = 16
"""Limits of each kind in one report; the newest are used."""
_ROUND_TRIP_US_MAX = 60_000_000
_SIZE_BYTES_MAX = 1 << 42
_TOOK_US_MAX = 86_400_000_000
_BITS_PER_US_MAX = 100_000
"""100 Gbit/s."""
_CONNECTIONS_MAX = 64
_NAME_LENGTH_MAX = 16  # as long as the kernel's
_DIRECTIONS = {
    measurement_pb2.DIRECTION_UP: TransferDirection.UP,
    measurement_pb2.DIRECTION_DOWN: TransferDirection.DOWN,
}


def observations(
    message: measurement_pb2.Measured, at_ms: Milliseconds, *, own: str
) -> Iterator[Observation]:
    """Observations in a report, clamped to what is possible.

    Args:
        message: The report.
        at_ms: Time of its arrival: the node's clock is not used.
        own: Congestion control of the coordinator's sockets.
    """
    for took_us in message.round_trips_us[-ROUND_TRIPS_MAX:]:
        if took_us > 0:
            yield RoundTrip(at_ms, Microseconds(min(took_us, _ROUND_TRIP_US_MAX)))
    for train in message.trains[-TRAINS_MAX:]:
        if train.sent > 0:
            yield _train(train, at_ms)
    for transfer in message.transfers[-TRANSFERS_MAX:]:
        direction = _DIRECTIONS.get(transfer.direction)
        if direction is not None and transfer.size_bytes >= SMALLEST_BYTES:
            yield _transfer(transfer, at_ms, direction)
    name = message.congestion_control[:_NAME_LENGTH_MAX]
    yield SocketReport(
        at_ms=at_ms,
        congestion_control=name if name.isascii() and name.isprintable() else "",
        is_probing_blocked=message.is_probing_blocked,
        coordinator_congestion_control=own,
    )


def _train(message: measurement_pb2.ProbeTrain, at_ms: Milliseconds) -> PacketTrain:
    sent_packets = min(message.sent, PACKETS_MAX)
    lost_packets = min(message.lost, sent_packets)
    bursts = min(max(message.bursts, 1), lost_packets)
    return PacketTrain(at_ms, sent_packets, lost_packets, bursts)


def _transfer(
    message: measurement_pb2.MeasuredTransfer, at_ms: Milliseconds, direction: TransferDirection
) -> TransferTime:
    size_bytes = min(message.size_bytes, _SIZE_BYTES_MAX)
    fastest_us = size_bytes * 8 // _BITS_PER_US_MAX + 1
    return TransferTime(
        at_ms=at_ms,
        direction=direction,
        size_bytes=Bytes(size_bytes),
        took_us=Microseconds(min(max(message.took_us, fastest_us), _TOOK_US_MAX)),
        connections=min(max(message.connections, 1), _CONNECTIONS_MAX),
    )


def reading_message(reading: NodeReading, now_ms: Milliseconds) -> job_pb2.Reading:
    """A reading as the public sees it, with the age of each figure."""
    return job_pb2.Reading(
        round_trip_us=_estimate(reading.round_trip_us, now_ms),
        least_round_trip_us=reading.least_round_trip_us,
        up_bits_per_s=_estimate(reading.up_bits_per_s, now_ms),
        down_bits_per_s=_estimate(reading.down_bits_per_s, now_ms),
        step_us=_estimate(reading.step_us, now_ms),
        loss=_loss(reading, now_ms),
        congestion_control=reading.congestion_control,
    )


def health_message(
    parts: HealthParts, excluded: Exclusion | None, digits: int = 4
) -> job_pb2.Health:
    """A node's health as the public sees it.

    Args:
        parts: Each in [0, 1].
        excluded: None: it is not.
        digits: Decimal places of the numbers.
    """
    rounded_parts = {name: round(part, digits) for name, part in parts._asdict().items()}
    return job_pb2.Health(
        value=round(parts.value, digits),
        level=parts.level,
        reason=health_reason(parts, excluded),
        excluded_until_s=0 if excluded is None else excluded.until_s,
        **rounded_parts,
    )


def health_history_message(history: HealthHistory) -> job_pb2.HealthHistory:
    """The health of up to a day, a byte a point."""
    points = bytes(_NO_LOOK if point is None else round(100 * point) for point in history.points)
    return job_pb2.HealthHistory(step_minutes=history.step_minutes, points=points)


_NO_LOOK = 255


def _estimate(estimate: Estimate, now_ms: Milliseconds) -> job_pb2.Estimate:
    return job_pb2.Estimate(
        mean=estimate.mean,
        spread=estimate.deviation,
        samples=estimate.count,
        age_ms=max(0, now_ms - estimate.at_ms) if estimate.count else 0,
    )


def _loss(reading: NodeReading, now_ms: Milliseconds) -> job_pb2.Estimate:
    """The mean of a Beta posterior and its standard deviation; inferred losses have no samples."""
    mean = loss_share(reading)
    if mean is None:
        return job_pb2.Estimate()
    if is_loss_inferred(reading):
        return job_pb2.Estimate(mean=mean, age_ms=max(0, now_ms - reading.up_bits_per_s.at_ms))
    return job_pb2.Estimate(
        mean=mean,
        spread=(mean * (1 - mean) / (reading.packets_sent + 2)) ** 0.5,
        samples=round(reading.packets_sent),
        age_ms=max(0, now_ms - reading.loss_at_ms),
    )

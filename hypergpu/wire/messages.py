"""Assignments, blobs, terms and receipts on the wire: the one translation that both ends use."""

from collections.abc import Iterable

import msgspec

from hypergpu.assignment import (
    Assignment,
    Delta,
    FailureCause,
    InitialModel,
    Lease,
    Prefetch,
    SampleRange,
    Task,
)
from hypergpu.blobs import BlobRef
from hypergpu.digests import digest_from_wire, digest_to_wire
from hypergpu.errors import HyperGPUError, Reason
from hypergpu.ids import Address, Digest, JobId, JobKey, Keccak, NodeId, Slot
from hypergpu.ledger_terms import Domain, Terms, address_bytes, word_bytes
from hypergpu.optimizer import OptimizerRule
from hypergpu.phases import PHASE_MS_MAX, PhaseDurations, WorkPhase
from hypergpu.statements import Contribution, Receipt, SignedReceipt, contribution_hash
from hypergpu.units import BasisPoints, Bytes, Milliseconds, Samples
from hypergpu.v1 import node_pb2, optimizer_pb2, receipt_pb2, tensor_pb2
from hypergpu.work_units import WorkUnit

_WORD_BYTES = 32
_ADDRESS_BYTES = 20


def phases_message(phases: PhaseDurations) -> node_pb2.PhaseDurations:
    """Durations of phases."""
    took = msgspec.structs.asdict(phases)
    return node_pb2.PhaseDurations(**{name: min(ms, PHASE_MS_MAX) for name, ms in took.items()})


def phases_value(message: node_pb2.PhaseDurations, sending_ms: int) -> PhaseDurations:
    """Durations off the wire, each at most `PHASE_MS_MAX`.

    Args:
        message: The report.
        sending_ms: From the header that brought it until the update was in: the upload goes on.
    """
    took = {name: getattr(message, name) for name in PhaseDurations.__struct_fields__}
    took["upload_ms"] += sending_ms
    return PhaseDurations(**{name: min(ms, PHASE_MS_MAX) for name, ms in took.items()})


_PHASES = {
    node_pb2.WORK_PHASE_DOWNLOAD: WorkPhase.DOWNLOAD,
    node_pb2.WORK_PHASE_TRAIN: WorkPhase.TRAIN,
    node_pb2.WORK_PHASE_WAIT: WorkPhase.WAIT,
    node_pb2.WORK_PHASE_UPLOAD: WorkPhase.UPLOAD,
}


def phase_number(phase: WorkPhase) -> node_pb2.WorkPhase.ValueType:
    """A phase that is told while it lasts."""
    return next(number for number, candidate in _PHASES.items() if candidate is phase)


def phase_value(number: int) -> WorkPhase | None:
    """A phase off the wire; None when it is none that is known here."""
    return next((phase for candidate, phase in _PHASES.items() if candidate == number), None)


_CAUSES = {
    node_pb2.FAILURE_CAUSE_OTHER: FailureCause.OTHER,
    node_pb2.FAILURE_CAUSE_OUT_OF_MEMORY: FailureCause.OUT_OF_MEMORY,
    node_pb2.FAILURE_CAUSE_OWNER: FailureCause.OWNER,
}


def hand_back_message(lease: node_pb2.Lease, reason: str, cause: FailureCause) -> node_pb2.HandBack:
    """A lease whose work will not be done."""
    number = next(number for number, candidate in _CAUSES.items() if candidate is cause)
    return node_pb2.HandBack(lease=lease, reason=reason, cause=number)


def cause_value(message: node_pb2.HandBack) -> FailureCause:
    """Why work is handed back; a cause that is not known here is another one."""
    if message.cause == node_pb2.FAILURE_CAUSE_UNSPECIFIED:
        return _cause_of_text(message.reason)
    return _CAUSES.get(message.cause, FailureCause.OTHER)


def _cause_of_text(reason: str) -> FailureCause:
    """The cause that a reason's beginning tells.

    Nodes of the version before send no cause, only this text. Nothing else looks at it.
    """
    if reason.startswith("out of memory"):
        return FailureCause.OUT_OF_MEMORY
    return FailureCause.OWNER if reason.startswith("OWNER_") else FailureCause.OTHER


def terms_message(terms: Terms, epoch: int) -> receipt_pb2.Terms:
    """A job's terms, with the epoch of one of its rounds."""
    return receipt_pb2.Terms(
        job=word_bytes(terms.job),
        epoch=epoch,
        chain_id=terms.domain.chain_id,
        contract=address_bytes(terms.domain.contract),
        coordinator=address_bytes(terms.coordinator),
        unit="" if terms.unit is WorkUnit.SAMPLES else terms.unit.value,
    )


def terms_value(message: receipt_pb2.Terms) -> Terms:
    """A job's terms from the wire.

    Raises:
        HyperGPUError: REQUEST_INVALID, a field has another size, or the unit is none of the list.
    """
    domain = Domain(message.chain_id, address_value(message.contract))
    job, coordinator = JobKey(word_value(message.job)), address_value(message.coordinator)
    return Terms(job, coordinator, domain, _stated_unit(message.unit))


def _stated_unit(name: str) -> WorkUnit | msgspec.UnsetType:
    if name in {"", WorkUnit.SAMPLES.value}:
        return msgspec.UNSET
    names = [unit.value for unit in WorkUnit]
    if name not in names:
        detail = f"work is counted in {', '.join(names)}, not in {name[:40]!r}"
        raise HyperGPUError(Reason.REQUEST_INVALID, detail, fix="upgrade: pip install -U hypergpu")
    return WorkUnit(name)


def word_value(octets: bytes) -> str:
    """A 32-byte word from the wire.

    Raises:
        HyperGPUError: REQUEST_INVALID, it has another size.
    """
    if len(octets) != _WORD_BYTES:
        detail = f"a hash has {_WORD_BYTES} bytes, not {len(octets)}"
        raise HyperGPUError(Reason.REQUEST_INVALID, detail)
    return octets.hex()


def address_value(octets: bytes) -> Address:
    """An address from the wire.

    Raises:
        HyperGPUError: REQUEST_INVALID, it has another size.
    """
    if len(octets) != _ADDRESS_BYTES:
        detail = f"an address has {_ADDRESS_BYTES} bytes, not {len(octets)}"
        raise HyperGPUError(Reason.REQUEST_INVALID, detail)
    return Address("0x" + octets.hex())


def receipt_message(signed: SignedReceipt) -> receipt_pb2.Receipt:
    """A signed receipt."""
    receipt, contribution = signed.receipt, signed.contribution
    return receipt_pb2.Receipt(
        job=word_bytes(receipt.job),
        epoch=receipt.epoch,
        round=receipt.round,
        sequence=receipt.sequence,
        contribution=receipt_pb2.Contribution(
            shard=tensor_pb2.Digest(value=word_bytes(contribution.shard)),
            model=tensor_pb2.Digest(value=word_bytes(contribution.model)),
            update=tensor_pb2.Digest(value=word_bytes(contribution.update)),
            inner_steps=contribution.inner_steps,
            compute_ms=contribution.compute_ms,
            update_bytes=contribution.update_bytes,
            lease=contribution.lease,
            nonce=contribution.nonce,
            signature=signed.contribution_signature,
        ),
        samples=receipt.samples,
        quality_bps=receipt.quality_bps,
        evaluator=word_bytes(receipt.evaluator),
        total_score=receipt.total_score,
        signature=signed.signature,
    )


def receipt_value(message: receipt_pb2.Receipt, node: NodeId) -> SignedReceipt:
    """A receipt from the wire; only the sizes of its fields are checked.

    Raises:
        HyperGPUError: REQUEST_INVALID, a field has another size.
    """
    statement = message.contribution
    contribution = Contribution(
        job=JobKey(word_value(message.job)),
        epoch=message.epoch,
        round=message.round,
        node=node,
        shard=digest_from_wire(statement.shard.value),
        model=digest_from_wire(statement.model.value),
        update=digest_from_wire(statement.update.value),
        samples=Samples(message.samples),
        inner_steps=statement.inner_steps,
        compute_ms=Milliseconds(statement.compute_ms),
        update_bytes=Bytes(statement.update_bytes),
        lease=statement.lease,
        nonce=statement.nonce,
    )
    receipt = Receipt(
        job=contribution.job,
        epoch=message.epoch,
        round=message.round,
        node=node,
        sequence=message.sequence,
        contribution=Keccak(contribution_hash(contribution).hex()),
        samples=Samples(message.samples),
        quality_bps=BasisPoints(message.quality_bps),
        evaluator=Keccak(word_value(message.evaluator)),
        total_score=message.total_score,
    )
    return SignedReceipt(
        receipt=receipt,
        signature=message.signature,
        contribution=contribution,
        contribution_signature=statement.signature,
    )


_options_encoder = msgspec.json.Encoder(order="sorted")
_options_decoder = msgspec.json.Decoder(dict[str, str | int | float | bool])


def digest_message(digest: Digest) -> tensor_pb2.Digest:
    """A digest on the wire."""
    return tensor_pb2.Digest(value=digest_to_wire(digest))


def digest_value(message: tensor_pb2.Digest) -> Digest:
    """A digest off the wire.

    Raises:
        HyperGPUError: REQUEST_INVALID, it is not 32 bytes.
    """
    return digest_from_wire(message.value)


def blob_message(blob: BlobRef) -> tensor_pb2.BlobRef:
    """A blob's name on the wire."""
    return tensor_pb2.BlobRef(digest=digest_message(blob.digest), size_bytes=blob.size_bytes)


def blob_value(message: tensor_pb2.BlobRef) -> BlobRef:
    """A blob's name off the wire.

    Raises:
        HyperGPUError: REQUEST_INVALID, its digest is not 32 bytes.
    """
    return BlobRef(digest_value(message.digest), Bytes(message.size_bytes))


def lease_message(lease: Lease) -> node_pb2.Lease:
    """A lease on the wire."""
    return node_pb2.Lease(job_id=lease.job_id, round=lease.round, number=lease.number)


def lease_value(message: node_pb2.Lease) -> Lease:
    """A lease off the wire."""
    return Lease(JobId(message.job_id), message.round, message.number)


def model_message(
    blob: BlobRef, deltas: Iterable[Delta], layout: Digest, initial: InitialModel | None = None
) -> tensor_pb2.ModelRef:
    """A model with the ways to it."""
    message = tensor_pb2.ModelRef(
        blob=blob_message(blob),
        deltas=[
            tensor_pb2.DeltaRef(
                base=digest_message(delta.base),
                blob=blob_message(delta.blob),
                codec=delta.codec,
            )
            for delta in deltas
        ],
        layout=digest_message(layout),
    )
    if initial is not None:
        initial_message = tensor_pb2.InitialModel(
            digest=digest_message(initial.digest), seed=initial.seed
        )
        message.initial.CopyFrom(initial_message)
    return message


def assignment_message(assignment: Assignment) -> node_pb2.Assignment:
    """An assignment on the wire."""
    task = assignment.task
    message = node_pb2.Assignment(
        lease=lease_message(assignment.lease),
        slot=assignment.slot,
        reason=assignment.reason,
        workload=task.workload,
        workload_version=task.workload_version,
        workload_options=_options_encoder.encode(task.options).decode(),
        training=node_pb2.Training(
            inner_steps=task.inner_steps,
            batch_size=task.batch_size,
            stated_batch_size=task.stated_batch_size,
            learning_rate=task.learning_rate,
            optimizer=optimizer_pb2.Optimizer(**msgspec.to_builtins(task.optimizer)),
            codec=task.codec,
            seed=task.seed,
            global_samples=task.global_samples,
            total_samples=task.total_samples,
            warmup_steps=task.warmup_steps,
            schedule=task.schedule,
        ),
        shard=node_pb2.Shard(
            partition=task.partition,
            partitions=task.partitions,
            skew_alpha=task.skew_alpha,
            ranges=_range_messages(task.ranges),
            seed=task.data_seed,
        ),
        model=model_message(task.model, assignment.deltas, task.layout, assignment.initial),
        deadline_in_ms=assignment.deadline_in_ms,
        upload_after_ms=assignment.upload_after_ms,
        connections=assignment.connections,
        terms=terms_message(assignment.terms, assignment.epoch),
        data_name=task.data_name,
        judgement=assignment.judgement,
        experts=task.experts or (),
    )
    if task.manifest is not None:
        message.manifest.CopyFrom(blob_message(task.manifest))
    if task.prefetched is not None:
        message.prefetched.CopyFrom(_prefetch_message(task.prefetched))
    if assignment.prefetch is not None:
        message.prefetch.CopyFrom(_prefetch_message(assignment.prefetch))
    if assignment.last_accepted is not None:
        message.last_accepted.CopyFrom(digest_message(assignment.last_accepted))
    return message


def assignment_value(message: node_pb2.Assignment) -> Assignment:
    """An assignment off the wire.

    Raises:
        HyperGPUError: REQUEST_INVALID, a digest, the workload's options or the terms are malformed.
    """
    model, has_accepted = message.model, message.HasField("last_accepted")
    return Assignment(
        lease=lease_value(message.lease),
        slot=Slot(message.slot),
        task=_task_value(message),
        deltas=tuple(
            Delta(digest_value(delta.base), blob_value(delta.blob), delta.codec)
            for delta in model.deltas
        ),
        initial=(
            InitialModel(digest_value(model.initial.digest), model.initial.seed)
            if model.HasField("initial")
            else None
        ),
        last_accepted=digest_value(message.last_accepted) if has_accepted else None,
        deadline_in_ms=Milliseconds(message.deadline_in_ms),
        upload_after_ms=Milliseconds(message.upload_after_ms),
        connections=max(1, message.connections),
        terms=_terms_of_job(message),
        epoch=message.terms.epoch,
        prefetch=_prefetch_value(message.prefetch) if message.HasField("prefetch") else None,
        reason=message.reason,
        judgement=message.judgement,
    )


def _optimizer_value(message: optimizer_pb2.Optimizer) -> OptimizerRule:
    return OptimizerRule(
        name=message.name,
        weight_decay=message.weight_decay,
        decay_scope=message.decay_scope,
        beta1=message.beta1,
        beta2=message.beta2,
        epsilon=message.epsilon,
        momentum=message.momentum,
        clip_norm=message.clip_norm,
        micro_batch=message.micro_batch,
        checkpoints_activations=message.checkpoints_activations,
        muon_ratio=message.muon_ratio or msgspec.UNSET,
    )


def _task_value(message: node_pb2.Assignment) -> Task:
    training, shard = message.training, message.shard
    return Task(
        workload=message.workload,
        workload_version=message.workload_version,
        options=_options_value(message.workload_options),
        inner_steps=training.inner_steps,
        batch_size=training.batch_size,
        stated_batch_size=training.stated_batch_size,
        learning_rate=training.learning_rate,
        optimizer=_optimizer_value(training.optimizer),
        warmup_steps=training.warmup_steps,
        schedule=training.schedule or "constant",
        codec=training.codec,
        seed=training.seed,
        global_samples=Samples(training.global_samples),
        total_samples=Samples(training.total_samples),
        partition=shard.partition,
        partitions=shard.partitions,
        skew_alpha=shard.skew_alpha,
        data_seed=shard.seed,
        ranges=_range_values(shard.ranges),
        model=blob_value(message.model.blob),
        layout=digest_value(message.model.layout),
        manifest=blob_value(message.manifest) if message.HasField("manifest") else None,
        data_name=message.data_name,
        experts=tuple(message.experts) or msgspec.UNSET,
        prefetched=_prefetch_value(message.prefetched) if message.HasField("prefetched") else None,
    )


def _options_value(text: str) -> dict[str, str | int | float | bool]:
    try:
        return _options_decoder.decode(text or "{}")
    except msgspec.MsgspecError as error:
        raise HyperGPUError(
            Reason.REQUEST_INVALID, f"the workload's options are malformed: {error}"
        ) from error


def _terms_of_job(message: node_pb2.Assignment) -> Terms:
    """What the node is to sign under. A key that names another job could be held against it."""
    terms, job_id = terms_value(message.terms), JobId(message.lease.job_id)
    if terms != Terms() and not terms.match(job_id):
        detail = f"the terms of {job_id[:80]!r} name another job"
        raise HyperGPUError(Reason.REQUEST_INVALID, detail)
    if terms.unit is not WorkUnit.SAMPLES:
        detail = f"trainings are counted in samples, and {job_id[:80]!r} in {terms.unit.value}"
        raise HyperGPUError(Reason.REQUEST_INVALID, detail)
    return terms


def _prefetch_message(prefetch: Prefetch) -> node_pb2.Prefetch:
    return node_pb2.Prefetch(
        round=prefetch.round,
        inner_steps=prefetch.inner_steps,
        ranges=_range_messages(prefetch.ranges),
        seed=prefetch.seed,
        global_samples=prefetch.global_samples,
        total_samples=prefetch.total_samples,
    )


def _prefetch_value(message: node_pb2.Prefetch) -> Prefetch:
    return Prefetch(
        round=message.round,
        inner_steps=message.inner_steps,
        ranges=_range_values(message.ranges),
        seed=message.seed,
        global_samples=Samples(message.global_samples),
        total_samples=Samples(message.total_samples),
    )


def _range_messages(ranges: Iterable[SampleRange]) -> list[node_pb2.SampleRange]:
    return [node_pb2.SampleRange(start=run.start, count=run.count) for run in ranges]


def _range_values(messages: Iterable[node_pb2.SampleRange]) -> tuple[SampleRange, ...]:
    return tuple(SampleRange(run.start, Samples(run.count)) for run in messages)

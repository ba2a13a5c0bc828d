"""NodeService and its updates. An offer is checked before a byte of the update is taken, cheap
checks first: size, nonce, already accepted, lease, signature; then the nonce's mark is raised. It
becomes durable while the bytes come and before they are accepted: until then they lie in
quarantine. TLS identity, revocation and rate were checked by the gate.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from functools import partial

import msgspec
import structlog

from coordinator.core.training.billing import epoch_rejection, later_epoch
from coordinator.core.training.job.events import UpdateReceived, UpdateRejected
from coordinator.core.training.job.state import AcceptedUpdate, Job, Participant, Phase
from coordinator.core.training.transition import rejection
from coordinator.core.training.trust.quality import offered_contribution
from coordinator.core.work.leases import WorkState
from coordinator.shell import translate
from coordinator.shell.driver.driver import Driver
from coordinator.shell.engine.heavy_work import HeavyWork
from coordinator.shell.failpoints import failpoint
from coordinator.shell.kinds.training.job_runtime import JobRuntime, upload_owner
from coordinator.shell.kinds.training.speed_keys import rate_key, speed_sources
from coordinator.shell.kinds.training.update_offers import OfferedUpdate, UpdateOffers
from coordinator.shell.kinds.training.weighing import UpdateWeighing
from coordinator.shell.nodes.fleet import Fleet
from coordinator.shell.nodes.readings import FinishedUpdate
from coordinator.shell.service.calls import Caller, Requests
from coordinator.shell.service.contributions import ResultIntake
from coordinator.shell.service.gates import NodeGate
from coordinator.shell.service.node_session import ControlSessions, Enrolment
from coordinator.shell.service.transfer import NodeBlobs
from coordinator.shell.store.blobs.upload_store import OpenUpload, upload_name
from coordinator.shell.store.storage import Storage
from hypergpu.assignment import Lease
from hypergpu.blobs import BlobRef
from hypergpu.clock import monotonic_ms
from hypergpu.errors import HyperGPUError, Reason
from hypergpu.ids import Digest, JobId, NodeId
from hypergpu.jobfile.spec import CODECS
from hypergpu.ledger_terms import separator_of
from hypergpu.statements import is_signed_by
from hypergpu.tensors.codec import IncrementalCheck, update_bytes
from hypergpu.tensors.layout import Layout
from hypergpu.units import Bytes, Milliseconds, Samples
from hypergpu.v1 import node_pb2
from hypergpu.wire.messages import digest_value, lease_value, phases_value
from hypergpu.wire.packing import pack_addresses
from hypergpu.wire.update_requests import UpdateAnswer

log = structlog.get_logger()

_NOW = Milliseconds(0)  # the driver stamps events as they enter its inbox
_KEEP_S = 0
"""Pins hold what is not journalled yet."""
_DATA_SAMPLES_MOST = 1 << 40
"""A larger number than any node has samples: it is the node's word."""
_WRONG_CONTENT = frozenset(
    {Reason.UPDATE_MALFORMED, Reason.UPDATE_NOT_FINITE, Reason.DIGEST_MISMATCH}
)


@dataclass(frozen=True)
class UpdateIntake:
    """Takes nodes' updates in."""

    driver: Driver
    storage: Storage
    fleet: Fleet
    heavy: HeavyWork
    weighing: UpdateWeighing
    offers: UpdateOffers

    async def let_in(
        self,
        node: NodeId,
        request: node_pb2.OfferUpdateRequest,
        count_fresh: Callable[[], None] = lambda: None,
    ) -> OpenUpload | UpdateAnswer:
        """Open an upload for what is missing of an update, or answer its offer.

        Args:
            node: Node that offers it.
            request: The offer. Its node may show it again until the update is in.
            count_fresh: Called for an offer that was not seen before; may refuse it.

        Raises:
            HyperGPUError: It would not be accepted, with the reason; DISK_FULL, it does not fit.
        """
        return await _Offer(self, node, request).take(count_fresh)

    async def commit(self, node: NodeId, lease: Lease, digest: Digest) -> None:
        """Check an update whose bytes have come; it is accepted and durable when this returns.

        Raises:
            HyperGPUError: OFFSET_MISMATCH, bytes are missing, or this process was not offered it;
                or it is not accepted, with the reason.
        """
        runtime = self.runtime(lease.job_id)
        if is_accepted(runtime.job, node, lease.number, digest):
            return
        offer = self.offers.of(node, lease, digest)
        if offer is None:
            raise HyperGPUError(Reason.OFFSET_MISMATCH, "it was not offered: offer it again")
        await self.storage.commits.run(offer.upload, _Commit(self, runtime, offer).run)

    async def reject_void_lease(self, runtime: JobRuntime, received: UpdateReceived) -> None:
        """Reject an update that the machine would not accept now; a late one is journalled.

        Raises:
            HyperGPUError: UPDATE_LATE, LEASE_STALE, EPOCH_CLOSED or SIGNATURE_INVALID.
        """
        if not (why := rejection(runtime.job, received)):
            return
        reason = _void_reason(runtime.job, received)
        if reason is Reason.UPDATE_LATE:
            await self.record_rejection(runtime, received, why)
        raise HyperGPUError(reason, why)

    async def record_rejection(
        self, runtime: JobRuntime, received: UpdateReceived, why: str
    ) -> None:
        """Count a rejection, and journal the node's first one while the job is in a round."""
        job, node = runtime.job, received.node
        if node not in job.members:
            return
        event = UpdateRejected(at_ms=_NOW, node=node, round=received.round, reason=why)
        # Counted first: the node may end this call meanwhile; the event is written all the same.
        self.fleet.nodes.count(node, rejected=1)
        if self.offers.is_first_rejection(node, job.job_id, job.model.round if job.model else 0):
            await self.driver.submit(job.job_id, event)
        log.info("an update was rejected", node=node, job_id=job.job_id, reason=why)

    def runtime(self, job_id: JobId) -> JobRuntime:
        """The training job of an id.

        Raises:
            HyperGPUError: JOB_UNKNOWN.
        """
        runtime = self.driver.runtimes_of(JobRuntime).get(job_id)
        if runtime is None:
            raise HyperGPUError(Reason.JOB_UNKNOWN, f"there is no job {job_id[:80]!r}")
        return runtime


def is_accepted(job: Job, node: NodeId, lease: int, digest: Digest) -> bool:
    """Whether this very update is in already, whatever has happened since.

    Bytes alone do not tell: training may give the same update twice, under two leases.
    """
    if (participant := _lease_holder(job, node, lease)) is not None:
        update = participant.update
        is_in = participant.work is WorkState.RECEIVED and update is not None
        return is_in and update is not None and update.blob.digest == digest
    member = job.members.get(node)
    return member is not None and (member.accepted_lease, member.last_accepted) == (lease, digest)


class _Offer:
    """One offer of an update."""

    def __init__(
        self, intake: UpdateIntake, node: NodeId, request: node_pb2.OfferUpdateRequest
    ) -> None:
        """Read the offer.

        Raises:
            HyperGPUError: JOB_UNKNOWN; NOT_READY; UPDATE_TOO_LARGE, no update of the job has this
                size.
        """
        self._intake = intake
        job_id, lease = JobId(request.lease.job_id), request.lease.number
        self._runtime = self._intake.runtime(job_id)
        codec = _assigned_codec(self._runtime.job, node, lease)
        experts = _assigned_experts(self._runtime.job, node, lease)
        _reject_other_size(self._runtime, request.size_bytes, codec, experts)
        self._report = request.report
        self._received = UpdateReceived(
            at_ms=_NOW,
            node=node,
            round=request.lease.round,
            lease=lease,
            update=AcceptedUpdate(
                blob=BlobRef(digest_value(request.digest), Bytes(request.size_bytes)),
                samples=Samples(request.report.samples),
                inner_steps=request.report.inner_steps,
                compute_ms=Milliseconds(request.report.compute_ms),
                loss_last=translate.finite(request.report.loss_last),
                memory=translate.memory_use(request.report),
                codec=codec,
                nonce=request.nonce,
                signature=request.signature,
                epoch=request.epoch if request.HasField("epoch") else None,
                data_samples=Samples(min(request.report.data_samples, _DATA_SAMPLES_MOST)),
            ),
        )

    async def take(self, count_fresh: Callable[[], None]) -> OpenUpload | UpdateAnswer:
        """Check the offer, and open the upload."""
        intake, update_event = self._intake, self._received
        node, blob = update_event.node, update_event.update.blob
        job_id = self._runtime.job.job_id
        key = f"update/{job_id}/{update_event.round}/{node}/{update_event.lease}/{blob.digest}"
        name = upload_name(key, owner=upload_owner(job_id, node))
        await intake.storage.commits.wait(name)
        if not intake.offers.knows(node):
            intake.offers.learn(node, await asyncio.to_thread(intake.driver.journal.nonce, node))
        # From here to `put` nothing is waited for, as requests with the same offer come at once.
        is_open = intake.offers.is_open(job_id, update_event)
        if not is_open:
            count_fresh()
            intake.offers.check_nonce(node, update_event.update.nonce)
        if is_accepted(self._runtime.job, node, update_event.lease, blob.digest):
            return UpdateAnswer(is_accepted=True)
        if (open_epoch := _open_epoch(self._runtime.job, update_event)) is not None:
            self._reject_unsigned()
            return UpdateAnswer(open_epoch=open_epoch)
        await self._intake.reject_void_lease(self._runtime, update_event)
        if not is_open:
            self._reject_unsigned()
            intake.offers.put(self._update(name))
        failpoint("upload.admitted")
        with self._runtime.tell_obstacle():
            return await asyncio.to_thread(intake.storage.uploads.open, name, blob)

    def _update(self, name: str) -> OfferedUpdate:
        """The offer, whose nonce is being used up durably."""
        intake, update_event = self._intake, self._received
        nonce_task = asyncio.ensure_future(
            intake.driver.in_writer(
                intake.driver.journal.advance_nonce, update_event.node, update_event.update.nonce
            )
        )
        # An update that never comes asks no more.
        nonce_task.add_done_callback(lambda done: done.cancelled() or done.exception())
        phases = self._report.phases if self._report.HasField("phases") else None
        return OfferedUpdate(
            self._runtime.job.job_id, update_event, name, nonce_task, monotonic_ms(), phases
        )

    def _reject_unsigned(self) -> None:
        """Reject an update that its node did not sign: receipts rest on that signature."""
        job, node, update = self._runtime.job, self._received.node, self._received.update
        contribution = offered_contribution(job, node, update)
        if not is_signed_by(node, separator_of(job.terms.domain), contribution, update.signature):
            detail = "the signature does not cover this update of this work: sign what was assigned"
            raise HyperGPUError(Reason.SIGNATURE_INVALID, detail)


class _Commit:
    """The end of an upload: checked, made a blob, and accepted by the machine."""

    def __init__(self, intake: UpdateIntake, runtime: JobRuntime, offered: OfferedUpdate) -> None:
        self._intake = intake
        self._runtime = runtime
        self._offered = offered
        self._received = offered.received

    async def run(self) -> None:
        """Have the update accepted.

        Raises:
            HyperGPUError: It is not, with the reason.
        """
        blob = self._received.update.blob
        await self._intake.reject_void_lease(self._runtime, self._received)
        if not await self._offered.is_fresh:
            detail = f"nonce {self._received.update.nonce} was used meanwhile"
            raise HyperGPUError(Reason.NONCE_REPLAYED, detail)
        self._intake.storage.pins.add([blob.digest])
        try:
            await self._store()
            await self._accept()
        except HyperGPUError as error:
            if error.reason in _WRONG_CONTENT:
                self._intake.offers.end(self._offered)
                await self._intake.record_rejection(self._runtime, self._received, error.detail)
            raise
        finally:
            self._intake.storage.pins.drop([blob.digest])
        self._intake.offers.end(self._offered)
        self._record_work()

    async def _store(self) -> None:
        """Make a checked and durable blob of the upload."""
        intake, name, blob = self._intake, self._offered.upload, self._received.update.blob
        update_event = self._received
        experts = _assigned_experts(self._runtime.job, update_event.node, update_event.lease)
        layout = _layout(self._runtime, experts)
        check = IncrementalCheck(layout, update_event.update.codec)
        with self._runtime.tell_obstacle():
            sealed_path = await intake.storage.bulk.receive_upload(name, blob)
        failpoint("upload.complete")
        finish = intake.storage.uploads.finish
        await intake.heavy.run(
            partial(finish, sealed_path, blob, observe=check.feed, keep_s=_KEEP_S)
        )
        check.finish()
        failpoint("upload.stored")

    async def _accept(self) -> None:
        job_id, node = self._runtime.job.job_id, self._received.node
        if why := await self._intake.driver.submit(job_id, self._final_event()):
            reason = _void_reason(self._runtime.job, self._received)
            if reason is not Reason.EPOCH_CLOSED:
                await self._intake.record_rejection(self._runtime, self._received, why)
            raise HyperGPUError(reason, why)
        failpoint("upload.accepted")
        update = self._received.update
        experts = _assigned_experts(self._runtime.job, node, self._received.lease)
        weighing, blob, codec = self._intake.weighing, update.blob, update.codec
        weighing.prepare_sketch(self._runtime, blob, codec, experts)
        weighing.prepare_trial(self._runtime, node, blob, codec, experts)
        self._intake.fleet.nodes.count(node, accepted=1)

    def _final_event(self) -> UpdateReceived:
        """The event with what the node reports of its phases; the upload lasted until now."""
        offer = self._offered
        if offer.phases is None:
            return self._received
        phases = phases_value(offer.phases, monotonic_ms() - offer.offered_ms)
        update = msgspec.structs.replace(self._received.update, phases=phases)
        return msgspec.structs.replace(self._received, update=update)

    def _record_work(self) -> None:
        """Add an accepted update's timings to the node's readings."""
        update_event, job = self._received, self._runtime.job
        participant = job.participant(update_event.node)
        if participant is None or participant.lease != update_event.lease:
            return
        stated_batch, update = job.spec.training.batch_size, update_event.update
        work = FinishedUpdate(
            job_id=self._runtime.job.job_id,
            lease=update_event.lease,
            inner_steps=update.inner_steps * participant.plan.batch(stated_batch) / stated_batch,
            compute_ms=update.compute_ms,
            forecast_ms=participant.plan.forecast_ms,
            took_ms=participant.took_ms,
            source=speed_sources(job, self._intake.fleet.nodes.streams, [update_event.node]).get(
                update_event.node
            ),
        )
        self._intake.fleet.readings.record_accepted(update_event.node, work)
        if update.compute_ms > 0:
            samples_per_s = 1000 * update.samples / update.compute_ms
            key = rate_key(self._runtime.job)
            self._intake.fleet.health.record_rate(update_event.node, key, samples_per_s)


def _reject_other_size(
    runtime: JobRuntime, size_bytes: int, codec: str, experts: tuple[int, ...]
) -> None:
    """Reject a size that no update under the lease has, or under a void one, no update."""
    parts = () if codec or runtime.job.model is None else runtime.job.model.held_parts
    layouts = [_layout(runtime, each.experts) for each in parts] or [_layout(runtime, experts)]
    codecs = (codec,) if codec else CODECS
    sizes_of_all = (update_bytes(it, each) for it in layouts for each in codecs)
    expected_sizes = list(dict.fromkeys(sizes_of_all))
    if size_bytes not in expected_sizes:
        sizes = " or ".join(map(str, expected_sizes))
        detail = f"an update of {runtime.job.job_id} ({codec or 'any codec'}) has {sizes} bytes,"
        raise HyperGPUError(Reason.UPDATE_TOO_LARGE, f"{detail} not {size_bytes}")


def _open_epoch(job: Job, received: UpdateReceived) -> int | None:
    """The epoch that an update's node has to sign for instead; None: it has not."""
    open_work = _open_work(job, received)
    return later_epoch(job, open_work, received.update) if open_work is not None else None


def _open_work(job: Job, received: UpdateReceived) -> Participant | None:
    """The work that an update is of, if it may still come in."""
    holder = _lease_holder(job, received.node, received.lease)
    is_open = holder is not None and holder.is_open and job.round_of(holder) == received.round
    return holder if is_open else None


def _void_reason(job: Job, received: UpdateReceived) -> Reason:
    if (work := _open_work(job, received)) and epoch_rejection(job, work, received.update):
        is_late = later_epoch(job, work, received.update) is not None
        return Reason.EPOCH_CLOSED if is_late else Reason.SIGNATURE_INVALID
    long_lease = job.long_leases.get(received.node)
    if (
        long_lease is not None
        and long_lease.base is not None
        and long_lease.base.round == received.round
    ):
        return Reason.LEASE_STALE
    is_open = job.phase in {Phase.TRAINING, Phase.PAUSED} and job.round is not None
    if is_open and job.round is not None and received.round == job.round.number:
        return Reason.LEASE_STALE
    return Reason.UPDATE_LATE


def _layout(runtime: JobRuntime, experts: tuple[int, ...]) -> Layout:
    if runtime.layout is None:
        raise HyperGPUError(Reason.NOT_READY, f"{runtime.job.job_id} is being taken up again")
    return runtime.held_layout(experts)


def _lease_holder(job: Job, node: NodeId, lease: int) -> Participant | None:
    """The node as a participant, if the lease is its newest."""
    participant = job.participant(node)
    return participant if participant is not None and participant.lease == lease else None


def _assigned_codec(job: Job, node: NodeId, lease: int) -> str:
    """Codec of the update under a lease; empty when the lease is void."""
    participant = _lease_holder(job, node, lease)
    return participant.codec if participant else ""


def _assigned_experts(job: Job, node: NodeId, lease: int) -> tuple[int, ...]:
    """Experts that the update under a lease covers; none: everything, or the lease is void."""
    participant = _lease_holder(job, node, lease)
    return participant.experts if participant else ()


JOIN = frozenset({"Join"})
"""What the main listener serves: the caller has no certificate yet."""


@dataclass(frozen=True)
class NodeServicer:
    """Both listeners share it; each serves its own methods."""

    gate: NodeGate
    enrolment: Enrolment
    sessions: ControlSessions
    blobs: NodeBlobs
    intake: UpdateIntake
    results: ResultIntake

    async def join(self, request: node_pb2.JoinRequest, caller: Caller) -> node_pb2.JoinResponse:
        return await self.enrolment.join(request, caller)

    async def renew_certificate(
        self, request: node_pb2.RenewCertificateRequest, caller: Caller
    ) -> node_pb2.RenewCertificateResponse:
        return await self.enrolment.renew(self.gate.node(caller), request)

    def control(
        self, requests: Requests, caller: Caller
    ) -> AsyncIterator[node_pb2.ControlResponse]:
        return self.sessions.control(caller, requests)

    async def resolve_blob(
        self, request: node_pb2.ResolveBlobRequest, caller: Caller
    ) -> node_pb2.ResolveBlobResponse:
        return await self.blobs.resolve_blob(self.gate.node(caller), request)

    async def offer_update(
        self, request: node_pb2.OfferUpdateRequest, caller: Caller
    ) -> node_pb2.OfferUpdateResponse:
        node, intake = self.gate.node(caller), self.intake
        if intake.storage.bulk.port:
            detail = "an update is one request to the bulk port, which the welcome names"
            raise HyperGPUError(Reason.REQUEST_INVALID, detail)
        judgement = await intake.let_in(node, request)
        if isinstance(judgement, UpdateAnswer):
            return node_pb2.OfferUpdateResponse(
                is_accepted=judgement.is_accepted, open_epoch=judgement.open_epoch
            )
        runtime = intake.runtime(JobId(request.lease.job_id))
        with runtime.tell_obstacle():
            ticket = await intake.storage.bulk.upload_ticket(node, judgement)
        ticket = pack_addresses(ticket, intake.fleet.nodes.known_address(node))
        return node_pb2.OfferUpdateResponse(ticket=ticket)

    async def contribute(
        self, request: node_pb2.ContributeRequest, caller: Caller
    ) -> node_pb2.ContributeResponse:
        return await self.results.contribute(self.gate.node(caller), request)

    async def offer_result(
        self, request: node_pb2.OfferResultRequest, caller: Caller
    ) -> node_pb2.OfferResultResponse:
        return await self.results.offer(self.gate.node(caller), request)

    async def commit_update(
        self, request: node_pb2.CommitUpdateRequest, caller: Caller
    ) -> node_pb2.CommitUpdateResponse:
        lease, digest = lease_value(request.lease), digest_value(request.digest)
        await self.intake.commit(self.gate.node(caller), lease, digest)
        return node_pb2.CommitUpdateResponse()

"""NodeService and its updates. Checks before the first byte is stored, cheap ones first: size,
nonce, already accepted, lease, signature; then the nonce's mark is raised, which becomes durable
while the bytes come and before they are accepted.

`SubmitUpdate` and `QueryUpload`: checks before the first byte is stored, cheap ones first.

Order: size, nonce, already accepted, lease, signature; then the nonce's mark is raised. TLS
identity, revocation and rate were checked by the gate. The mark becomes durable while the bytes
come and before they are accepted: until then they lie in quarantine, where a repeated header can
only go on with the very same upload. Stripes of one update come under one nonce, each once.
"""

import asyncio
from collections.abc import AsyncIterator

import msgspec
import structlog

from coordinator.core.job.events import UpdateReceived, UpdateRejected
from coordinator.core.job.state import AcceptedUpdate, Job, Participant, Phase, WorkState
from coordinator.core.quality import offered_contribution
from coordinator.core.round.transition import rejection
from coordinator.shell import translate
from coordinator.shell.blobs.upload_store import StripeUpload
from coordinator.shell.blobs.writing import WholeUpload
from coordinator.shell.failpoints import failpoint
from coordinator.shell.runtime.driver import JobRuntime, upload_owner
from coordinator.shell.runtime.nodes import AddBytes, FinishedUpdate
from coordinator.shell.runtime.services import Services, UploadAttempt
from coordinator.shell.servicers.calls import Caller, NodeGate, Requests
from coordinator.shell.servicers.node_session import Enrolment, control
from coordinator.shell.servicers.transfer import (
    UploadStream,
    end_attempt,
    reject_other_offset,
    resolve_blob,
    store_stream,
)
from hypergpu.errors import HyperGPUError, Reason
from hypergpu.ids import Digest, JobId, NodeId
from hypergpu.jobfile.spec import CODECS
from hypergpu.statements import BlobRef, is_signed_by, separator_of
from hypergpu.streams import PIECE_BYTES, StallTimeout, monotonic_ms, stripe_from_wire
from hypergpu.tensors.codec import IncrementalCheck, update_bytes
from hypergpu.tensors.layout import Layout
from hypergpu.units import Bytes, Milliseconds, Samples
from hypergpu.v1 import node_pb2
from hypergpu.wire.chunks import CHUNK_BYTES
from hypergpu.wire.messages import digest_value, phases_value

log = structlog.get_logger()

_NOW = Milliseconds(0)  # the driver stamps events as they enter its inbox
_KEEP_S = 0
"""Pins hold what is not journalled yet."""
_DRAIN_MS = 5_000
_WRONG_CONTENT = frozenset(
    {Reason.UPDATE_MALFORMED, Reason.UPDATE_NOT_FINITE, Reason.DIGEST_MISMATCH}
)


async def submit_update(
    services: Services, node: NodeId, requests: Requests
) -> node_pb2.SubmitUpdateResponse:
    """Take in one update, or go on with one, and time its bytes.

    Returns:
        How far the update or its stripe is stored, and whether the update is accepted and durable:
        of the stripes of one update the call that completes it says so.

    Raises:
        HyperGPUError: it is not accepted, with the reason.
    """
    with services.readings.upload_meter(node).stream() as add_bytes:
        header = await requests.next(services.settings.read_timeout_ms)
        if not isinstance(header, node_pb2.UpdateHeader):
            raise HyperGPUError(Reason.REQUEST_INVALID, "the stream begins with a header")
        return await _UpdateCall(services, node, header).take_in(requests, add_bytes)


async def query_upload(
    services: Services, node: NodeId, request: node_pb2.QueryUploadRequest
) -> node_pb2.QueryUploadResponse:
    """How much of an update is stored, or that nothing is left to send."""
    runtime = _runtime(services, JobId(request.lease.job_id))
    job, lease, digest = runtime.job, request.lease.number, digest_value(request.digest)
    if is_accepted(job, node, lease, digest):
        return node_pb2.QueryUploadResponse(is_accepted=True)
    key = _key(job.job_id, request.lease.round, node, lease, digest)
    owner = upload_owner(job.job_id, node)
    if request.stripes <= 1 and request.stripe == 0:
        committed = await asyncio.to_thread(services.uploads.committed_offset, key, owner=owner)
        return node_pb2.QueryUploadResponse(committed_offset=committed)
    codec = _assigned_codec(job, node, lease) or job.spec.codec.up
    blob = BlobRef(digest, update_bytes(_layout(runtime), codec))
    stripe = stripe_from_wire(request.stripe, request.stripes, blob.size_bytes)
    ask = services.uploads.committed_stripe
    committed = await asyncio.to_thread(ask, key, blob, stripe, owner=owner)
    return node_pb2.QueryUploadResponse(committed_offset=committed)


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


class _UpdateCall:
    """One call that brings an update, or a stripe of it."""

    def __init__(self, services: Services, node: NodeId, header: node_pb2.UpdateHeader) -> None:
        """Read the header.

        Raises:
            HyperGPUError: JOB_UNKNOWN; NOT_READY; UPDATE_TOO_LARGE, no update of the job has this
                size; REQUEST_INVALID, there is no such stripe.
        """
        self._services = services
        offer = self._offer = translate.offer_value(header, node)
        self._runtime = _runtime(services, offer.job_id)
        self._blob = BlobRef(offer.digest, offer.size_bytes)
        codec = _assigned_codec(self._runtime.job, node, offer.lease)
        self._reject_other_size(codec)
        self._stripe = stripe_from_wire(header.stripe, header.stripes, offer.size_bytes)
        self._offset = header.offset
        self._report, self._began_ms = header.report, monotonic_ms()
        self._received = UpdateReceived(
            at_ms=_NOW,
            node=node,
            round=offer.round,
            lease=offer.lease,
            update=AcceptedUpdate(
                blob=self._blob,
                samples=Samples(header.report.samples),
                inner_steps=header.report.inner_steps,
                compute_ms=Milliseconds(header.report.compute_ms),
                loss_last=translate.finite(header.report.loss_last),
                codec=codec,
                nonce=offer.nonce,
                signature=offer.signature,
            ),
        )

    async def take_in(
        self, requests: Requests, add_bytes: AddBytes
    ) -> node_pb2.SubmitUpdateResponse:
        """Check the offer, store its bytes and have the update accepted once it is whole."""
        attempt = await self._attempt()
        if not self._is_accepted():
            await self._reject_void_lease()
            self._reject_unsigned()
            marking = self._use_nonce(attempt)
            failpoint("upload.admitted")
            self._services.pins.add([self._blob.digest])
            try:
                committed = await self._store(requests, add_bytes)
                # The journal has the last word. Shielded: other stripes wait for it too.
                if not await asyncio.shield(marking):
                    detail = f"nonce {self._offer.nonce} was used meanwhile"
                    raise HyperGPUError(Reason.NONCE_REPLAYED, detail)
                if committed is not None:
                    return node_pb2.SubmitUpdateResponse(committed_offset=committed)
                await self._accept()
            finally:
                self._services.pins.drop([self._blob.digest])
        self._record_work()
        return node_pb2.SubmitUpdateResponse(
            committed_offset=self._blob.size_bytes, is_accepted=True
        )

    def _reject_other_size(self, codec: str) -> None:
        """Reject a size that no update under the lease has, or under a void one, no update."""
        layout, offer = _layout(self._runtime), self._offer
        expected = [update_bytes(layout, each) for each in ((codec,) if codec else CODECS)]
        if offer.size_bytes not in expected:
            sizes = " or ".join(map(str, expected))
            detail = f"an update of {offer.job_id} ({codec or 'any codec'}) has {sizes} bytes,"
            detail += f" not {offer.size_bytes}"
            raise HyperGPUError(Reason.UPDATE_TOO_LARGE, detail)

    async def _attempt(self) -> UploadAttempt | None:
        """The attempt that a stripe belongs to; None for the first one, whose nonce is fresh.

        Raises:
            HyperGPUError: NONCE_REPLAYED.
        """
        nonces, node = self._services.nonces, self._offer.node
        if not nonces.knows(node):
            nonces.learn(node, await asyncio.to_thread(self._services.journal.nonce, node))
        return nonces.sibling(self._offer, self._stripe)

    def _use_nonce(self, attempt: UploadAttempt | None) -> "asyncio.Future[bool]":
        """Raise the mark here at once, and durably by the time that the future is done."""
        if attempt is not None:
            attempt.begun_stripes.add(self._stripe.index)
            return attempt.is_fresh
        offer, driver = self._offer, self._services.driver
        marking = asyncio.ensure_future(
            driver.in_writer(self._services.journal.advance_nonce, offer.node, offer.nonce)
        )
        # An upload that is rejected meanwhile asks no more.
        marking.add_done_callback(lambda done: done.cancelled() or done.exception())
        self._services.nonces.begin(offer, self._stripe, marking)
        return marking

    def _is_accepted(self) -> bool:
        offer = self._offer
        return is_accepted(self._runtime.job, offer.node, offer.lease, offer.digest)

    def _reject_unsigned(self) -> None:
        """Reject an update that its node did not sign: receipts rest on that signature."""
        job, node, update = self._runtime.job, self._offer.node, self._received.update
        offered = offered_contribution(job, node, update)
        if not is_signed_by(node, separator_of(job.terms.domain), offered, update.signature):
            detail = "the signature does not cover this update of this work: sign what was assigned"
            raise HyperGPUError(Reason.SIGNATURE_INVALID, detail)

    async def _reject_void_lease(self) -> None:
        if not (why := rejection(self._runtime.job, self._received)):
            return
        reason = self._void_reason()
        if reason is Reason.UPDATE_LATE:
            await self._record_rejection(why)
        raise HyperGPUError(reason, why)

    def _void_reason(self) -> Reason:
        job = self._runtime.job
        is_open = job.phase in {Phase.TRAINING, Phase.PAUSED} and job.round is not None
        if is_open and job.round is not None and self._offer.round == job.round.number:
            return Reason.LEASE_STALE
        return Reason.UPDATE_LATE

    async def _record_rejection(self, why: str) -> None:
        job, node = self._runtime.job, self._offer.node
        if node not in job.members:
            return
        event = UpdateRejected(at_ms=_NOW, node=node, round=self._offer.round, reason=why)
        # Counted first: the node may end this call meanwhile; the event is written all the same.
        self._services.nodes.count(node, rejected=1)
        await self._services.driver.submit(job.job_id, event)
        log.info("an update was rejected", node=node, job_id=job.job_id, reason=why)

    async def _store(self, requests: Requests, add_bytes: AddBytes) -> Bytes | None:
        """Bytes into quarantine, and a checked and durable blob once all are there.

        Returns:
            How far the upload is stored; None: the update is a blob, and it is this call's to have
            it accepted.
        """
        check = IncrementalCheck(_layout(self._runtime), self._received.update.codec)
        upload = await asyncio.to_thread(self._open_upload, check)
        try:
            reject_other_offset(upload, self._offset)
            await requests.admit()
            stream = UploadStream(upload, requests, self._stall_timeout(), add_bytes)
            committed = await store_stream(stream)
            if committed != self._stripe.end(self._blob.size_bytes):
                return committed
            failpoint("upload.complete")
            is_whole = await asyncio.to_thread(_finish_upload, upload, check)
            return None if is_whole else committed
        except HyperGPUError as error:
            if error.reason in _WRONG_CONTENT:
                await asyncio.to_thread(upload.discard)
                await self._record_rejection(error.detail)
                await requests.drain(_DRAIN_MS)
            elif not upload.is_open:
                await self._reject_void_lease()  # What cut it off, most likely.
            raise
        finally:
            end_attempt(upload)

    def _stall_timeout(self) -> StallTimeout:
        count = self._stripe.count
        left_bytes = self._stripe.end(self._blob.size_bytes) - self._offset
        largest = PIECE_BYTES if count > 1 else CHUNK_BYTES
        timeout_ms = Milliseconds(self._services.settings.read_timeout_ms)
        return StallTimeout(min(largest, left_bytes), timeout_ms, connections=count)

    def _open_upload(self, check: IncrementalCheck) -> WholeUpload | StripeUpload:
        """The upload that the header begins or goes on with.

        The check sees its bytes as they come, or all at the end where they come as stripes.
        """
        offer, quarantine, blob = self._offer, self._services.uploads, self._blob
        key = _key(offer.job_id, offer.round, offer.node, offer.lease, offer.digest)
        owner = upload_owner(offer.job_id, offer.node)
        if self._stripe.count == 1:
            return quarantine.open(key, blob, check.feed, owner=owner)
        return quarantine.open_stripe(key, blob, self._stripe, check.feed, owner=owner)

    async def _accept(self) -> None:
        why = await self._services.driver.submit(self._offer.job_id, self._final_event())
        if why and self._is_accepted():
            return  # Two streams brought the same bytes; the other was first.
        if why:
            await self._record_rejection(why)
            raise HyperGPUError(self._void_reason(), why)
        failpoint("upload.accepted")
        self._services.nodes.count(self._offer.node, accepted=1)

    def _final_event(self) -> UpdateReceived:
        """The event with what the node reports of its phases; the upload lasted until now."""
        if not self._report.HasField("phases"):
            return self._received
        phases = phases_value(self._report.phases, monotonic_ms() - self._began_ms)
        update = msgspec.structs.replace(self._received.update, phases=phases)
        return msgspec.structs.replace(self._received, update=update)

    def _record_work(self) -> None:
        """Add an accepted update's timings to the node's readings."""
        offer, round_ = self._offer, self._runtime.job.round
        participant = round_.participants.get(offer.node) if round_ else None
        if round_ is None or participant is None or not self._is_accepted():
            return
        stated, update = round_.spec.training.batch_size, self._received.update
        work = FinishedUpdate(
            job_id=offer.job_id,
            lease=offer.lease,
            inner_steps=update.inner_steps * participant.plan.batch(stated) / stated,
            compute_ms=update.compute_ms,
            forecast_ms=participant.plan.forecast_ms,
            took_ms=participant.took_ms,
        )
        self._services.readings.record_accepted(offer.node, work)


def _runtime(services: Services, job_id: JobId) -> JobRuntime:
    runtime = services.driver.runtimes.get(job_id)
    if runtime is None:
        raise HyperGPUError(Reason.JOB_UNKNOWN, f"there is no job {job_id[:80]!r}")
    return runtime


def _layout(runtime: JobRuntime) -> Layout:
    if runtime.layout is None:
        raise HyperGPUError(Reason.NOT_READY, f"{runtime.job.job_id} is being taken up again")
    return runtime.layout


def _lease_holder(job: Job, node: NodeId, lease: int) -> Participant | None:
    """The node as a participant, if the lease is its newest."""
    participant = job.round.participants.get(node) if job.round else None
    return participant if participant is not None and participant.lease == lease else None


def _assigned_codec(job: Job, node: NodeId, lease: int) -> str:
    """Codec of the update under a lease; empty when the lease is void."""
    participant = _lease_holder(job, node, lease)
    return participant.codec if participant else ""


def _key(job_id: JobId, round_number: int, node: NodeId, lease: int, digest: Digest) -> str:
    return f"update/{job_id}/{round_number}/{node}/{lease}/{digest}"


def _finish_upload(upload: WholeUpload | StripeUpload, check: IncrementalCheck) -> bool:
    """Make a durable blob of an upload whose bytes are all there; False: other stripes miss."""
    if isinstance(upload, StripeUpload) and not upload.gather():
        return False
    check.finish()
    upload.finish(keep_s=_KEEP_S)
    failpoint("upload.stored")
    return True


JOIN = frozenset({"Join"})
"""What the main listener serves: the caller has no certificate yet."""


class NodeServicer:
    """Both listeners share it; each serves its own methods."""

    def __init__(self, services: Services, gate: NodeGate, enrolment: Enrolment) -> None:
        self._services = services
        self._gate = gate
        self._enrolment = enrolment

    async def join(self, request: node_pb2.JoinRequest, caller: Caller) -> node_pb2.JoinResponse:
        return await self._enrolment.join(request, caller)

    async def renew_certificate(
        self, request: node_pb2.RenewCertificateRequest, caller: Caller
    ) -> node_pb2.RenewCertificateResponse:
        return await self._enrolment.renew(self._gate.node(caller), request)

    def control(
        self, requests: Requests, caller: Caller
    ) -> AsyncIterator[node_pb2.ControlResponse]:
        return control(self._services, self._gate, self._gate.node(caller), requests)

    async def resolve_blob(
        self, request: node_pb2.ResolveBlobRequest, caller: Caller
    ) -> node_pb2.ResolveBlobResponse:
        digest = digest_value(request.digest)
        return await resolve_blob(self._services, self._gate.node(caller), digest)

    async def query_upload(
        self, request: node_pb2.QueryUploadRequest, caller: Caller
    ) -> node_pb2.QueryUploadResponse:
        return await query_upload(self._services, self._gate.node(caller), request)

    async def submit_update(
        self, requests: Requests, caller: Caller
    ) -> node_pb2.SubmitUpdateResponse:
        node = self._gate.node(caller)
        return await submit_update(self._services, node, requests)

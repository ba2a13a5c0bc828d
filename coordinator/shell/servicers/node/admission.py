"""`SubmitUpdate`: what needs no bytes is checked before the first is stored, cheap checks first.

Order: size, nonce, already accepted, lease, signature; then the nonce's mark is raised. TLS
identity, revocation and rate were checked by the gate. The mark becomes durable while the bytes
come and before they are accepted: until then they lie in quarantine, where a repeated header can
only go on with the very same upload. Stripes of one update come under one nonce, each once.
"""

import asyncio
from typing import NamedTuple

import structlog

from coordinator.core.job.events import UpdateReceived, UpdateRejected
from coordinator.core.job.state import AcceptedUpdate, Job, Phase, WorkState
from coordinator.core.quality.contributions import offered_contribution
from coordinator.core.round.transition import rejection
from coordinator.shell import translate
from coordinator.shell.blobs.stripes import StripeUpload
from coordinator.shell.blobs.upload import Upload
from coordinator.shell.failpoints import failpoint
from coordinator.shell.runtime.job_runtime import JobRuntime, upload_owner
from coordinator.shell.runtime.services import Services
from coordinator.shell.runtime.upload_nonces import UploadAttempt
from coordinator.shell.servicers.uploads import Intake, leave, refuse_other_offset, take_in
from coordinator.shell.servicers.wire.chunks import CHUNK_BYTES
from coordinator.shell.servicers.wire.handlers import Requests
from coordinator.shell.translate import Offer
from hypergpu.errors import HyperGPUError, Reason
from hypergpu.ids import Digest, JobId, NodeId
from hypergpu.jobfile.spec import SCHEMES
from hypergpu.statements.assignment import BlobRef
from hypergpu.statements.contribution import is_signed_by
from hypergpu.statements.domain import separator_of
from hypergpu.tensors.codec import IncrementalCheck, update_bytes
from hypergpu.tensors.layout import Layout
from hypergpu.units import Bytes, Milliseconds, Samples
from hypergpu.v1 import node_pb2
from hypergpu.wire.assignment import digest_value
from hypergpu.wire.bulk import PIECE_BYTES, StallTimeout, Stripe, stripe_from_wire

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
    """Take in one update, or go on with one.

    Returns:
        How far the update or its stripe is stored, and whether the update is accepted and durable:
        of the stripes of one update the call that completes it says so.

    Raises:
        HyperGPUError: it is not accepted, with the reason.
    """
    header = await requests.next(services.settings.read_timeout_ms)
    if not isinstance(header, node_pb2.UpdateHeader):
        raise HyperGPUError(Reason.REQUEST_INVALID, "the stream begins with a header")
    offer = translate.offer_value(header, node)
    runtime = _runtime(services, offer.job_id)
    scheme = _assigned_scheme(runtime.job, node, offer.lease)
    _refuse_other_size(_layout(runtime), offer, scheme)
    stripe = stripe_from_wire(header.stripe, header.stripes, offer.size_bytes)
    attempt = await _attempt(services, offer, stripe)
    if is_accepted(runtime.job, node, offer.lease, offer.digest):
        return _acceptance(offer)
    received = _update_event(header, offer, scheme)
    await _refuse_void_lease(services, runtime, received)
    _refuse_unsigned(runtime.job, received)
    marking = _use_up(services, offer, stripe, attempt)
    failpoint("upload.admitted")
    services.pins.add([offer.digest])
    try:
        arrival = Arrival(received, stripe, header.offset)
        stored = await _store_update(services, runtime, requests, arrival)
        await _refuse_used_meanwhile(marking, offer)
        if not stored.is_whole:
            return node_pb2.SubmitUpdateResponse(committed_offset=stored.committed_offset)
        await _accept(services, runtime, received)
    finally:
        services.pins.drop([offer.digest])
    return _acceptance(offer)


def _acceptance(offer: Offer) -> node_pb2.SubmitUpdateResponse:
    return node_pb2.SubmitUpdateResponse(committed_offset=offer.size_bytes, is_accepted=True)


async def query_upload(
    services: Services, node: NodeId, request: node_pb2.QueryUploadRequest
) -> node_pb2.QueryUploadResponse:
    """How much of an update is stored, or that nothing is left to send."""
    runtime = _runtime(services, JobId(request.lease.job_id))
    digest = digest_value(request.digest)
    if is_accepted(runtime.job, node, request.lease.number, digest):
        return node_pb2.QueryUploadResponse(is_accepted=True)
    key = _key(runtime.job.job_id, request.lease.round, node, request.lease.number, digest)
    owner = upload_owner(runtime.job.job_id, node)
    if request.stripes <= 1 and request.stripe == 0:
        committed = await asyncio.to_thread(services.quarantine.committed_offset, key, owner=owner)
        return node_pb2.QueryUploadResponse(committed_offset=committed)
    scheme = _assigned_scheme(runtime.job, node, request.lease.number)
    blob = BlobRef(digest, update_bytes(_layout(runtime), scheme or runtime.job.spec.codec.up))
    stripe = stripe_from_wire(request.stripe, request.stripes, blob.size_bytes)
    ask = services.quarantine.committed_stripe
    committed = await asyncio.to_thread(ask, key, blob, stripe, owner=owner)
    return node_pb2.QueryUploadResponse(committed_offset=committed)


def is_accepted(job: Job, node: NodeId, lease: int, digest: Digest) -> bool:
    """Whether this very update is in already, whatever has happened since.

    Bytes alone do not tell: training may give the same update twice, under two leases.
    """
    participant = job.round.participants.get(node) if job.round else None
    if participant is not None and participant.lease == lease:
        update = participant.update
        if participant.work is not WorkState.RECEIVED or update is None:
            return False
        return update.blob.digest == digest
    member = job.members.get(node)
    return member is not None and (member.accepted_lease, member.last_accepted) == (lease, digest)


def _runtime(services: Services, job_id: JobId) -> JobRuntime:
    runtime = services.driver.runtimes.get(job_id)
    if runtime is None:
        raise HyperGPUError(Reason.JOB_UNKNOWN, f"there is no job {job_id[:80]!r}")
    return runtime


def _layout(runtime: JobRuntime) -> Layout:
    if runtime.layout is None:
        raise HyperGPUError(Reason.NOT_READY, f"{runtime.job.job_id} is being taken up again")
    return runtime.layout


def _assigned_scheme(job: Job, node: NodeId, lease: int) -> str:
    """How the update under a lease is to be encoded; empty when the lease is void."""
    participant = job.round.participants.get(node) if job.round else None
    is_held = participant is not None and participant.lease == lease
    return participant.codec if is_held and participant else ""


def _refuse_other_size(layout: Layout, offer: Offer, scheme: str) -> None:
    """Refuse what cannot be the update that was asked for, or under a void lease, any update."""
    expected = [update_bytes(layout, each) for each in ((scheme,) if scheme else SCHEMES)]
    if offer.size_bytes not in expected:
        sizes = " or ".join(map(str, expected))
        detail = f"an update of {offer.job_id} ({scheme or 'any scheme'}) has {sizes} bytes,"
        detail += f" not {offer.size_bytes}"
        raise HyperGPUError(Reason.UPDATE_TOO_LARGE, detail)


async def _attempt(services: Services, offer: Offer, stripe: Stripe) -> UploadAttempt | None:
    """The attempt that a stripe belongs to; None for the first one, whose nonce is fresh.

    Raises:
        HyperGPUError: NONCE_REPLAYED.
    """
    if not services.nonces.knows(offer.node):
        services.nonces.learn(
            offer.node, await asyncio.to_thread(services.journal.nonce, offer.node)
        )
    return services.nonces.sibling(offer, stripe)


def _use_up(
    services: Services, offer: Offer, stripe: Stripe, attempt: UploadAttempt | None
) -> "asyncio.Future[bool]":
    """Raise the mark here at once, and durably by the time that what is returned is done."""
    if attempt is not None:
        attempt.begun_stripes.add(stripe.index)
        return attempt.is_fresh
    marking = asyncio.ensure_future(
        services.driver.in_writer(services.journal.advance_nonce, offer.node, offer.nonce)
    )
    # An upload that is refused meanwhile asks no more.
    marking.add_done_callback(lambda done: done.cancelled() or done.exception())
    services.nonces.begin(offer, stripe, marking)
    return marking


async def _refuse_used_meanwhile(marking: "asyncio.Future[bool]", offer: Offer) -> None:
    """The journal has the last word."""
    # Shielded: other stripes wait for it too.
    if not await asyncio.shield(marking):
        raise HyperGPUError(Reason.NONCE_REPLAYED, f"nonce {offer.nonce} was used meanwhile")


def _update_event(header: node_pb2.UpdateHeader, offer: Offer, scheme: str) -> UpdateReceived:
    """The event that the update becomes if everything about it holds."""
    report = header.report
    return UpdateReceived(
        at_ms=_NOW,
        node=offer.node,
        round=offer.round,
        lease=offer.lease,
        update=AcceptedUpdate(
            blob=BlobRef(offer.digest, offer.size_bytes),
            samples=Samples(report.samples),
            inner_steps=report.inner_steps,
            compute_ms=Milliseconds(report.compute_ms),
            loss_last=translate.finite(report.loss_last),
            codec=scheme,
            nonce=offer.nonce,
            signature=offer.signature,
        ),
    )


def _refuse_unsigned(job: Job, received: UpdateReceived) -> None:
    """Refuse an update that its node did not sign: receipts rest on that signature."""
    node, update = received.node, received.update
    offered = offered_contribution(job, node, update)
    if not is_signed_by(node, separator_of(job.terms.domain), offered, update.signature):
        detail = "the signature does not cover this update of this work: sign what was assigned"
        raise HyperGPUError(Reason.SIGNATURE_INVALID, detail)


async def _refuse_void_lease(
    services: Services, runtime: JobRuntime, received: UpdateReceived
) -> None:
    if not (why := rejection(runtime.job, received)):
        return
    reason = _void_reason(runtime.job, received)
    if reason is Reason.UPDATE_LATE:
        await _note_refusal(services, runtime, received, why)
    raise HyperGPUError(reason, why)


def _void_reason(job: Job, received: UpdateReceived) -> Reason:
    is_open = job.phase in {Phase.TRAINING, Phase.PAUSED} and job.round is not None
    if is_open and job.round is not None and received.round == job.round.number:
        return Reason.LEASE_STALE
    return Reason.UPDATE_LATE


async def _note_refusal(
    services: Services, runtime: JobRuntime, received: UpdateReceived, why: str
) -> None:
    if received.node not in runtime.job.members:
        return
    event = UpdateRejected(at_ms=_NOW, node=received.node, round=received.round, reason=why)
    await services.driver.submit(runtime.job.job_id, event)
    services.nodes.count(received.node, refused=1)
    log.info("an update was refused", node=received.node, job_id=runtime.job.job_id, reason=why)


def _key(job_id: JobId, round_number: int, node: NodeId, lease: int, digest: Digest) -> str:
    return f"update/{job_id}/{round_number}/{node}/{lease}/{digest}"


class Arrival(NamedTuple):
    """What a header announced."""

    received: UpdateReceived
    stripe: Stripe
    offset: int


class Stored(NamedTuple):
    """What became of it."""

    committed_offset: Bytes
    is_whole: bool
    """The update is a blob, and it is this call's to have it accepted."""


async def _store_update(
    services: Services, runtime: JobRuntime, requests: Requests, arrival: Arrival
) -> Stored:
    """Bytes into quarantine, and a checked and durable blob once all are there."""
    received = arrival.received
    check = IncrementalCheck(_layout(runtime), arrival.received.update.codec)
    upload = await asyncio.to_thread(_open_upload, services, runtime, arrival, check)
    is_whole = False
    try:
        refuse_other_offset(upload, arrival.offset)
        await requests.admit()
        patience = _patience(arrival, services.settings.read_timeout_ms)
        committed = await take_in(Intake(upload, requests, patience))
        if committed == arrival.stripe.end(received.update.blob.size_bytes):
            failpoint("upload.complete")
            is_whole = await asyncio.to_thread(_finish_upload, upload, check)
    except HyperGPUError as refused:
        if refused.reason in _WRONG_CONTENT:
            await asyncio.to_thread(upload.discard)
            await _note_refusal(services, runtime, received, refused.detail)
            await requests.drain(_DRAIN_MS)
        elif not upload.is_open:
            await _refuse_void_lease(services, runtime, received)  # What cut it off, most likely.
        raise
    finally:
        leave(upload)
    return Stored(committed, is_whole)


def _patience(arrival: Arrival, timeout_ms: int) -> StallTimeout:
    count = arrival.stripe.count
    left_bytes = arrival.stripe.end(arrival.received.update.blob.size_bytes) - arrival.offset
    largest = PIECE_BYTES if count > 1 else CHUNK_BYTES
    return StallTimeout(min(largest, left_bytes), Milliseconds(timeout_ms), connections=count)


def _open_upload(
    services: Services, runtime: JobRuntime, arrival: Arrival, check: IncrementalCheck
) -> Upload | StripeUpload:
    """The upload that a header begins or goes on with. The check sees its bytes as they come, or
    all at the end where they come as stripes.
    """
    received, job_id = arrival.received, runtime.job.job_id
    blob = received.update.blob
    key = _key(job_id, received.round, received.node, received.lease, blob.digest)
    owner = upload_owner(job_id, received.node)
    if arrival.stripe.count == 1:
        return services.quarantine.open(key, blob, check.feed, owner=owner)
    return services.quarantine.open_stripe(key, blob, arrival.stripe, check.feed, owner=owner)


def _finish_upload(upload: Upload | StripeUpload, check: IncrementalCheck) -> bool:
    if isinstance(upload, StripeUpload) and not upload.gather():
        return False
    check.finish()
    upload.finish(keep_s=_KEEP_S)
    failpoint("upload.stored")
    return True


async def _accept(services: Services, runtime: JobRuntime, received: UpdateReceived) -> None:
    job_id, digest = runtime.job.job_id, received.update.blob.digest
    why = await services.driver.submit(job_id, received)
    if why and is_accepted(runtime.job, received.node, received.lease, digest):
        return  # Two streams brought the same bytes; the other was first.
    if why:
        await _note_refusal(services, runtime, received, why)
        raise HyperGPUError(_void_reason(runtime.job, received), why)
    failpoint("upload.accepted")
    services.nodes.count(received.node, accepted=1)

"""`SubmitUpdate`: what needs no bytes is checked before the first is stored, cheap checks first.

Order: size, nonce, already accepted, lease, signature; then the nonce's mark is raised. TLS
identity, revocation and rate were checked by the gate. The mark becomes durable while the bytes
come and before they are accepted: until then they lie in quarantine, where a repeated header can
only go on with the very same upload.
"""

import asyncio

import structlog

from coordinator.core.events import UpdateReceived, UpdateRefused
from coordinator.core.job import BlobRef, Job, Phase, Update, Work
from coordinator.core.transition import refusal
from coordinator.shell import translate
from coordinator.shell.blobs.quarantine import Upload
from coordinator.shell.failpoints import failpoint
from coordinator.shell.runtime.parts import Parts
from coordinator.shell.runtime.room import Room, uploader
from coordinator.shell.servicers.uploads import Intake, leave, refuse_other_offset, take_in
from coordinator.shell.servicers.wire.handlers import Requests
from hypergpu.codec import IncrementalCheck, update_bytes
from hypergpu.ids import Digest, JobId, NodeId
from hypergpu.layout import Layout
from hypergpu.refusal import Reason, RefusalError
from hypergpu.signature import UpdateClaim, verify
from hypergpu.units import Bytes, Milliseconds, Samples
from hypergpu.v1 import node_pb2

log = structlog.get_logger()

_NOW = Milliseconds(0)  # the driver stamps events as they enter its inbox
_KEEP_S = 0
"""Pins hold what is not journalled yet."""
_DRAIN_MS = 5_000
_WRONG_CONTENT = frozenset(
    {Reason.UPDATE_MALFORMED, Reason.UPDATE_NOT_FINITE, Reason.DIGEST_MISMATCH}
)


async def submit_update(
    parts: Parts, node: NodeId, requests: Requests
) -> node_pb2.SubmitUpdateResponse:
    """Take in one update, or go on with one.

    Returns:
        The whole size once the update is accepted and durable; less when the stream ended early.

    Raises:
        RefusalError: it is not accepted, with the reason.
    """
    header = await requests.next(parts.settings.read_timeout_ms)
    if not isinstance(header, node_pb2.UpdateHeader):
        raise RefusalError(Reason.REQUEST_INVALID, "the stream begins with a header")
    claim = translate.update_claim(header, node)
    room = _room(parts, claim.job_id)
    layout = _layout(room)
    _refuse_other_size(room, layout, claim)
    await _refuse_used_nonce(parts, claim)
    if is_accepted(room.job, node, claim.lease, claim.digest):
        return node_pb2.SubmitUpdateResponse(committed_offset=claim.size_bytes)
    received = _received(header, claim)
    await _refuse_void_lease(parts, room, received)
    if not verify(node, claim, header.signature):
        detail = "the signature does not cover this header"
        raise RefusalError(Reason.SIGNATURE_INVALID, detail)
    marking = _use_up(parts, claim)
    failpoint("upload.admitted")
    parts.pins.add([claim.digest])
    try:
        committed = await _stored(parts, room, requests, received, header.offset)
        await _refuse_used_meanwhile(marking, claim)
        if committed == claim.size_bytes:
            await _accept(parts, room, received)
    finally:
        parts.pins.drop([claim.digest])
    return node_pb2.SubmitUpdateResponse(committed_offset=committed)


async def query_upload(
    parts: Parts, node: NodeId, request: node_pb2.QueryUploadRequest
) -> node_pb2.QueryUploadResponse:
    """How much of an update is stored, or that nothing is left to send."""
    room = _room(parts, JobId(request.lease.job_id))
    digest = translate.digest_value(request.digest)
    if is_accepted(room.job, node, request.lease.number, digest):
        return node_pb2.QueryUploadResponse(is_accepted=True)
    key = _key(room.job.job_id, request.lease.round, node, request.lease.number, digest)
    owner = uploader(room.job.job_id, node)
    committed = await asyncio.to_thread(parts.quarantine.committed_offset, key, owner=owner)
    return node_pb2.QueryUploadResponse(committed_offset=committed)


def is_accepted(job: Job, node: NodeId, lease: int, digest: Digest) -> bool:
    """Whether this very update is in already, whatever has happened since.

    Bytes alone do not tell: training may give the same update twice, under two leases.
    """
    participant = job.round.participants.get(node) if job.round else None
    if participant is not None and participant.lease == lease:
        update = participant.update
        if participant.work is not Work.RECEIVED or update is None:
            return False
        return update.blob.digest == digest
    member = job.members.get(node)
    return member is not None and (member.accepted_lease, member.last_accepted) == (lease, digest)


def _room(parts: Parts, job_id: JobId) -> Room:
    room = parts.driver.rooms.get(job_id)
    if room is None:
        raise RefusalError(Reason.JOB_UNKNOWN, f"there is no job {job_id[:80]!r}")
    return room


def _layout(room: Room) -> Layout:
    if room.layout is None:
        raise RefusalError(Reason.NOT_READY, f"{room.job.job_id} is being taken up again")
    return room.layout


def _refuse_other_size(room: Room, layout: Layout, claim: UpdateClaim) -> None:
    scheme = room.job.spec.codec.up
    expected = update_bytes(layout, scheme)
    if claim.size_bytes != expected:
        detail = (
            f"an update of {claim.job_id} ({scheme}) has {expected} bytes, not {claim.size_bytes}"
        )
        raise RefusalError(Reason.UPDATE_TOO_LARGE, detail)


async def _refuse_used_nonce(parts: Parts, claim: UpdateClaim) -> None:
    if claim.node not in parts.nonces:
        mark = await asyncio.to_thread(parts.journal.nonce, claim.node)
        parts.nonces[claim.node] = max(mark, parts.nonces.get(claim.node, 0))
    mark = parts.nonces[claim.node]
    if claim.nonce <= mark:
        raise RefusalError(Reason.NONCE_REPLAYED, f"nonce {claim.nonce} is not above {mark}")


def _use_up(parts: Parts, claim: UpdateClaim) -> "asyncio.Future[bool]":
    """Raise the mark here at once, and durably by the time that what is returned is done."""
    parts.nonces[claim.node] = max(claim.nonce, parts.nonces.get(claim.node, 0))
    marking = asyncio.ensure_future(
        parts.driver.in_writer(parts.journal.advance_nonce, claim.node, claim.nonce)
    )
    # An upload that is refused meanwhile asks no more.
    marking.add_done_callback(lambda done: done.cancelled() or done.exception())
    return marking


async def _refuse_used_meanwhile(marking: "asyncio.Future[bool]", claim: UpdateClaim) -> None:
    """The journal has the last word."""
    if not await marking:
        raise RefusalError(Reason.NONCE_REPLAYED, f"nonce {claim.nonce} was used meanwhile")


def _received(header: node_pb2.UpdateHeader, claim: UpdateClaim) -> UpdateReceived:
    """The event that the update becomes if everything about it holds."""
    report = header.report
    return UpdateReceived(
        at_ms=_NOW,
        node=claim.node,
        round=claim.round,
        lease=claim.lease,
        update=Update(
            blob=BlobRef(claim.digest, claim.size_bytes),
            samples=Samples(report.samples),
            inner_steps=report.inner_steps,
            compute_ms=Milliseconds(report.compute_ms),
            loss_last=translate.finite(report.loss_last),
        ),
    )


async def _refuse_void_lease(parts: Parts, room: Room, received: UpdateReceived) -> None:
    if not (why := refusal(room.job, received)):
        return
    reason = _void_reason(room.job, received)
    if reason is Reason.UPDATE_LATE:
        await _note_refusal(parts, room, received, why)
    raise RefusalError(reason, why)


def _void_reason(job: Job, received: UpdateReceived) -> Reason:
    is_open = job.phase in {Phase.TRAINING, Phase.PAUSED} and job.round is not None
    if is_open and job.round is not None and received.round == job.round.number:
        return Reason.LEASE_STALE
    return Reason.UPDATE_LATE


async def _note_refusal(parts: Parts, room: Room, received: UpdateReceived, why: str) -> None:
    if received.node not in room.job.members:
        return
    event = UpdateRefused(at_ms=_NOW, node=received.node, round=received.round, reason=why)
    await parts.driver.submit(room.job.job_id, event)
    parts.roster.count(received.node, refused=1)
    log.info("an update was refused", node=received.node, job_id=room.job.job_id, reason=why)


def _key(job_id: JobId, round_number: int, node: NodeId, lease: int, digest: Digest) -> str:
    return f"update/{job_id}/{round_number}/{node}/{lease}/{digest}"


async def _stored(
    parts: Parts, room: Room, requests: Requests, received: UpdateReceived, offset: int
) -> Bytes:
    """Bytes into quarantine, checked as they come, and a durable blob once all are there."""
    job_id, blob = room.job.job_id, received.update.blob
    check = IncrementalCheck(_layout(room), room.job.spec.codec.up)
    key = _key(job_id, received.round, received.node, received.lease, blob.digest)
    owner = uploader(job_id, received.node)
    upload = await asyncio.to_thread(parts.quarantine.open, key, blob, check.feed, owner=owner)
    try:
        refuse_other_offset(upload, offset)
        await requests.admit()
        committed = await take_in(Intake(upload, requests, parts.settings.read_timeout_ms))
        if committed == blob.size_bytes:
            failpoint("upload.complete")
            await asyncio.to_thread(_finished, upload, check)
    except RefusalError as refused:
        if refused.reason in _WRONG_CONTENT:
            await asyncio.to_thread(upload.discard)
            await _note_refusal(parts, room, received, refused.detail)
            await requests.drain(_DRAIN_MS)
        elif not upload.is_open:
            await _refuse_void_lease(parts, room, received)  # What cut it off, most likely.
        raise
    finally:
        leave(upload)
    return committed


def _finished(upload: Upload, check: IncrementalCheck) -> None:
    check.finish()
    upload.finish(keep_s=_KEEP_S)
    failpoint("upload.stored")


async def _accept(parts: Parts, room: Room, received: UpdateReceived) -> None:
    job_id, digest = room.job.job_id, received.update.blob.digest
    why = await parts.driver.submit(job_id, received)
    if why and is_accepted(room.job, received.node, received.lease, digest):
        return  # Two streams brought the same bytes; the other was first.
    if why:
        await _note_refusal(parts, room, received, why)
        raise RefusalError(_void_reason(room.job, received), why)
    failpoint("upload.accepted")
    parts.roster.count(received.node, accepted=1)

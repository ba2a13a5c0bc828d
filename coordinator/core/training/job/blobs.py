"""Blobs that a job still needs."""

from collections.abc import Iterator

from coordinator.core.training.job.state import Job, Model, Participant
from hypergpu.blobs import BlobRef
from hypergpu.ids import Digest


def live_blobs(job: Job) -> frozenset[Digest]:
    """Digests that must not be collected while the job exists."""
    return frozenset(blob.digest for blob in _blobs(job))


def _blobs(job: Job) -> Iterator[BlobRef]:
    if job.manifest is not None:
        yield job.manifest
    if job.weights is not None:
        yield job.weights.blob
    for model in (job.model, job.previous, *job.evaluating):
        if model is not None:
            yield from _model_blobs(model)
    if job.best_model is not None:
        yield job.best_model.blob
    yield from _work_blobs(job)


def _model_blobs(model: Model) -> Iterator[BlobRef]:
    yield model.blob
    if model.outer_state is not None:
        yield model.outer_state
    for delta in model.deltas:
        yield delta.blob
    for part in model.held_parts:
        yield part.blob
        yield from (delta.blob for delta in part.deltas)


def _work_blobs(job: Job) -> Iterator[BlobRef]:
    """Updates that are not folded or may be folded again, and models that work begins from."""
    rounds = [round_.participants for round_ in (job.round, job.closed) if round_ is not None]
    for participants in (*rounds, job.long_leases):
        for participant in participants.values():
            yield from _participant_blobs(participant)
    open_participants = job.round.participants if job.round is not None else {}
    for participant in (*open_participants.values(), *job.long_leases.values()):
        if participant.base is not None and participant.update is not None:
            yield participant.base.model.blob  # Its own samples are differentiated there.


def _participant_blobs(participant: Participant) -> Iterator[BlobRef]:
    """Its update, and the model that a lease over several rounds begins from."""
    if participant.update is not None:
        yield participant.update.blob
    if participant.duplicate is not None:
        yield participant.duplicate.update.blob
    if participant.base is not None and participant.is_open:
        yield from _model_blobs(participant.base.model)

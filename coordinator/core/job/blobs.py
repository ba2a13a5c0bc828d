"""Blobs that a job still needs."""

from collections.abc import Iterator

from coordinator.core.job.state import Job, Model, Round
from hypergpu.ids import Digest
from hypergpu.statements import BlobRef


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
    for round_ in (job.round, job.closed):
        if round_ is not None:
            yield from _update_blobs(round_)


def _model_blobs(model: Model) -> Iterator[BlobRef]:
    yield model.blob
    if model.outer_state is not None:
        yield model.outer_state
    for delta in model.deltas:
        yield delta.blob


def _update_blobs(round_: Round) -> Iterator[BlobRef]:
    for participant in round_.participants.values():
        if participant.update is not None:
            yield participant.update.blob

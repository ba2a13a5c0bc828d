"""`Aggregate`: fold the closed round's updates into the next model, in a thread, and report it."""

import asyncio
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import NamedTuple

import structlog

from coordinator.core.commands import Aggregate, FoldedUpdate
from coordinator.core.deltas import extend_chain
from coordinator.core.events import AggregateReady, ModelLost
from coordinator.core.job import BlobRef, Delta, Model
from coordinator.shell.failpoints import failpoint
from coordinator.shell.numerics.fold import fold
from coordinator.shell.numerics.request import (
    BaseDamagedError,
    DivergedError,
    FoldedFile,
    FoldRequest,
    FoldResult,
    NoUpdatesError,
    OuterRule,
    StoredBlob,
    StoredUpdate,
)
from coordinator.shell.runtime.parts import Parts
from coordinator.shell.runtime.room import Room
from coordinator.shell.translate import finite
from hypergpu.errors import HyperGPUError, Reason
from hypergpu.ids import Digest, NodeId
from hypergpu.tensors.layout import Layout
from hypergpu.units import Bytes, Milliseconds, Samples

log = structlog.get_logger()

_RETRY_S = 5.0
_KEEP_S = 0
"""Pins hold what is not journalled yet."""


class Outcome(NamedTuple):
    """The next model and who is not in it."""

    model: Model
    refused: tuple[tuple[NodeId, str], ...]
    pinned: tuple[Digest, ...] = ()
    agreement: float | None = None
    agreements: Mapping[NodeId, float] = MappingProxyType({})
    """Cosine of each update with the sum of the others, as far as it is known."""


async def aggregate(parts: Parts, room: Room, command: Aggregate) -> None:
    """Answer the command with `AggregateReady`, or with `ModelLost` when its base is damaged."""
    outcome = await _outcome(parts, room, command)
    if outcome is None:
        return
    served_bytes = room.bytes_down
    event = AggregateReady(
        at_ms=Milliseconds(0),
        round=command.round,
        model=outcome.model,
        refused=outcome.refused,
        bytes_down=served_bytes,
        agreement=outcome.agreement,
        agreements=dict(outcome.agreements),
    )
    try:
        await _made_durable(parts, room, command.base)
        reason = await parts.driver.insist(room.job.job_id, event)
    finally:
        parts.pins.drop(outcome.pinned)
    if reason:
        log.info("an aggregate came too late", job_id=room.job.job_id, reason=reason)
        return
    room.bytes_down = Bytes(room.bytes_down - served_bytes)
    if failed := await asyncio.to_thread(_sync, parts, outcome.pinned):
        log.warning("a model is not durable yet", job_id=room.job.job_id, reason=failed)


async def _outcome(parts: Parts, room: Room, command: Aggregate) -> Outcome | None:
    """Fold until it works: a full disk is waited out, a damaged base is reported and ends it."""
    layout = room.layout
    if layout is None:
        raise AssertionError("a round cannot close before its layout is known")
    failpoint("aggregate.begin")
    while True:
        try:
            return await _folded_apart(parts, layout, command)
        except BaseDamagedError as damaged:
            await _report_lost(parts, room, command, str(damaged))
            return None
        except (HyperGPUError, OSError) as failed:
            log.warning("a fold waits", job_id=room.job.job_id, reason=str(failed))
            await asyncio.sleep(_RETRY_S)


async def _folded_apart(parts: Parts, layout: Layout, command: Aggregate) -> Outcome:
    """Fold in a thread, which nothing can stop: what nobody waits for any more is unpinned."""
    folding = asyncio.ensure_future(asyncio.to_thread(fold_updates, parts, layout, command))

    def abandon(folding: "asyncio.Future[Outcome]") -> None:
        if not folding.cancelled() and folding.exception() is None:
            parts.pins.drop(folding.result().pinned)

    try:
        return await asyncio.shield(folding)
    except asyncio.CancelledError:
        folding.add_done_callback(abandon)
        raise


async def _made_durable(parts: Parts, room: Room, base: Model) -> None:
    """See to it that a power cut leaves the base: the model made of it may still be lost.

    It was synced when it was new; this finds something to do only where that failed.
    """
    newest = base.newest_delta
    blobs = (base.blob, base.outer_state, newest.blob if newest else None)
    digests = [blob.digest for blob in blobs if blob is not None]
    while failed := await asyncio.to_thread(_sync, parts, digests):
        log.warning("a fold waits for its base", job_id=room.job.job_id, reason=failed)
        await asyncio.sleep(_RETRY_S)


async def _report_lost(parts: Parts, room: Room, command: Aggregate, why: str) -> None:
    job_id, digest = room.job.job_id, command.base.blob.digest
    log.error("a model is damaged", job_id=job_id, model=digest, reason=why)
    event = ModelLost(at_ms=Milliseconds(0), model=digest, reason=why)
    if reason := await parts.driver.insist(job_id, event):
        log.error("the job cannot go on: its base is damaged too", job_id=job_id, reason=reason)


def fold_updates(parts: Parts, layout: Layout, command: Aggregate) -> Outcome:
    """Fold once, into blobs that the caller unpins. Blocks.

    Raises:
        HyperGPUError: DISK_FULL; nothing is left behind.
        BaseDamagedError: The model before is missing or damaged.
        OSError: The disk fails.
    """
    spec = command.spec
    usable, refused = _usable(parts, command.updates)
    request = FoldRequest(
        layout=layout,
        down=command.down,
        outer=spec.outer,
        outer_rule=OuterRule.PLAIN if command.is_sparse else OuterRule.NESTEROV,
        scale=command.scale,
        base_model=_base(parts, command.base.blob),
        outer_state=_base(parts, command.base.outer_state) if command.base.outer_state else None,
        updates=tuple(stored for _, stored in usable),
        output_dir=parts.blobs.work_path("fold").parent,
    )
    nodes = [update.node for update, _ in usable]
    try:
        result = fold(request, reuse=parts.blobs.reuse)
    except NoUpdatesError as none_left:
        refused += [(nodes[each.index], each.reason) for each in none_left.refused]
        return Outcome(_unchanged_model(command.base), tuple(refused))
    except DivergedError as diverged:
        refused += [(node, str(diverged)) for node in nodes]
        return Outcome(_unchanged_model(command.base), tuple(refused))
    failpoint("aggregate.folded")
    refused += [(nodes[each.index], each.reason) for each in result.refused]
    agreements = {
        node: found
        for node, found in zip(nodes, result.agreements, strict=True)
        if found is not None
    }
    outcome = _keep_result(parts, command, result, tuple(refused))
    return outcome._replace(agreements=agreements)


def _keep_result(
    parts: Parts, command: Aggregate, result: FoldResult, refused: tuple[tuple[NodeId, str], ...]
) -> Outcome:
    """Adopt and pin a fold's files, or leave nothing of them."""
    pinned = tuple(file.digest for file in result.files)
    parts.pins.add(pinned)
    try:
        model = _adopt_blobs(parts, command, result)
        agreement = None if result.agreement is None else finite(result.agreement)
        return Outcome(model, refused, pinned, agreement)
    except BaseException:
        parts.pins.drop(pinned)
        for file in result.files:
            file.path.unlink(missing_ok=True)
        raise


def _usable(
    parts: Parts, updates: tuple[FoldedUpdate, ...]
) -> tuple[list[tuple[FoldedUpdate, StoredUpdate]], list[tuple[NodeId, str]]]:
    """Updates that are on disk, and those that the blob store already knows to be damaged."""
    usable: list[tuple[FoldedUpdate, StoredUpdate]] = []
    refused: list[tuple[NodeId, str]] = []
    for update in updates:
        try:
            path = parts.blobs.path(update.blob.digest)
        except HyperGPUError as missing:
            if missing.reason is not Reason.BLOB_UNKNOWN:
                raise
            refused.append((update.node, missing.detail))
        else:
            weight = Samples(update.weight)
            stored = StoredUpdate(path, update.blob.digest, weight, update.scheme)
            usable.append((update, stored))
    return usable, refused


def _base(parts: Parts, blob: BlobRef) -> StoredBlob:
    try:
        return StoredBlob(parts.blobs.path(blob.digest), blob.digest)
    except HyperGPUError as missing:
        if missing.reason is not Reason.BLOB_UNKNOWN:
            raise
        stored = StoredBlob(parts.blobs.work_path(blob.digest), blob.digest)
        raise BaseDamagedError(stored, missing.detail) from missing


def _unchanged_model(base: Model) -> Model:
    """The round counts, the model stays."""
    return Model(base.round + 1, base.blob, base.outer_state, base.deltas)


def _adopt_blobs(parts: Parts, command: Aggregate, result: FoldResult) -> Model:
    """Turn the fold's files into blobs. A power cut may lose them: they can be folded again."""
    kept = {file: BlobRef(file.digest, file.size_bytes) for file in result.files}
    _adopt(parts, result.model)
    failpoint("aggregate.model_stored")
    for file in result.files[1:]:
        _adopt(parts, file)
    failpoint("aggregate.stored")
    deltas: tuple[Delta, ...] = ()
    if result.delta is not None:
        delta = Delta(command.base.blob.digest, kept[result.delta], command.down)
        deltas = extend_chain(command.base, delta, result.model.size_bytes)
    return Model(
        command.base.round + 1,
        kept[result.model],
        kept[result.outer_state] if result.outer_state is not None else None,
        deltas,
    )


def _adopt(parts: Parts, file: FoldedFile) -> None:
    blob = BlobRef(file.digest, file.size_bytes)
    parts.blobs.adopt_unsynced(file.path, blob, keep_s=_KEEP_S)


def _sync(parts: Parts, digests: Iterable[Digest]) -> str:
    """Make blobs durable. Returns why one is not; empty when all are, or are gone."""
    why = ""
    for digest in digests:
        try:
            parts.blobs.sync(digest)
        except HyperGPUError as refused:
            if refused.reason is not Reason.BLOB_UNKNOWN:
                why = refused.detail
        except OSError as failed:
            why = f"{digest}: {failed}"
    return why

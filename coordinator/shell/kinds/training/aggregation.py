"""`Aggregate`: fold the closed round's updates into the next model, in a thread, and report it."""

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import msgspec
import structlog
from blake3 import blake3
from msgspec.structs import replace

from coordinator.core.training.job.chain import extend_chain
from coordinator.core.training.job.commands import Aggregate, FoldedUpdate
from coordinator.core.training.job.events import AggregateReady
from coordinator.core.training.job.state import Model, ModelPart
from coordinator.core.training.job.trust_memory import Weighing
from coordinator.core.training.trust.weights import WHOLE, is_hopeless
from coordinator.core.work.work_events import JobPaused
from coordinator.shell.aggregation.fold_request import (
    BaseDamagedError,
    DivergedError,
    FoldedFile,
    FoldRequest,
    FoldResult,
    NoUpdatesError,
    StoredUpdate,
)
from coordinator.shell.driver.driver import Driver
from coordinator.shell.engine.heavy_work import HeavyWork
from coordinator.shell.engine.sharded_fold import fold_by
from coordinator.shell.failpoints import failpoint
from coordinator.shell.kinds.training.job_runtime import JobRuntime
from coordinator.shell.kinds.training.lost_model import report_lost_model
from coordinator.shell.kinds.training.part_folding import (
    NO_PARTS,
    MadeParts,
    merged_update,
    next_parts,
    sound_updates,
)
from coordinator.shell.kinds.training.weighing import (
    UpdateWeighing,
    WeighedRound,
    stored_base,
)
from coordinator.shell.store.storage import Storage
from hypergpu.assignment import Delta
from hypergpu.blobs import BlobRef
from hypergpu.errors import HyperGPUError, Reason
from hypergpu.ids import Digest, NodeId
from hypergpu.tensors.layout import Layout
from hypergpu.units import Bytes, Milliseconds

log = structlog.get_logger()

_RETRY_S = 5.0
_HOPELESS = "training itself diverges: lower inner.learning_rate or outer.learning_rate"
_KEEP_S = 0
"""Pins hold what is not journalled yet."""


class AggregatedRound(NamedTuple):
    """The event that reports the next model, and its blobs, which the caller unpins."""

    event: AggregateReady
    pinned: tuple[Digest, ...] = ()


@dataclass(frozen=True)
class Aggregation:
    """Performs `Aggregate`: weighs a closed round's updates and folds them into the next model."""

    driver: Driver
    storage: Storage
    heavy: HeavyWork
    weighing: UpdateWeighing

    async def aggregate(self, runtime: JobRuntime, command: Aggregate) -> None:
        """Answer with `AggregateReady`, or with `ModelLost` when the base is damaged."""
        failpoint("aggregate.begin")
        try:
            aggregated_round = await self.weigh_and_fold(runtime, command)
        except BaseDamagedError as error:
            lost_digest = command.base.blob.digest
            await report_lost_model(self.driver, runtime.job.job_id, lost_digest, str(error))
            return
        served_bytes = runtime.bytes_down
        draw = self.weighing.round_draw(runtime.job.job_id, command.round + 1)
        event = replace(aggregated_round.event, bytes_down=served_bytes, draw=draw)
        try:
            await self._sync_base(runtime, command.base)
            reason = await self.driver.report(runtime.job.job_id, event)
        finally:
            self.storage.pins.drop(aggregated_round.pinned)
        if reason:
            return
        self.weighing.prepare_gradient(runtime)
        runtime.bytes_down = Bytes(runtime.bytes_down - served_bytes)
        if failure := await asyncio.to_thread(self._sync, aggregated_round.pinned):
            log.warning("a model is not durable yet", job_id=runtime.job.job_id, reason=failure)
        memory = runtime.job.trust
        if event.weighing is not None and event.weighing.rollback and is_hopeless(memory):
            why = f"{event.weighing.rollback}, {memory.rollbacks} times in a row: {_HOPELESS}"
            await self.driver.report(
                runtime.job.job_id, JobPaused(at_ms=Milliseconds(0), reason=why)
            )

    async def weigh_and_fold(self, runtime: JobRuntime, command: Aggregate) -> AggregatedRound:
        """Weigh the updates, unless they were folded before, and fold those that count.

        Raises:
            BaseDamagedError: The model before is missing or damaged.
        """
        weighed_round = (
            WeighedRound(command.weighing)
            if command.weighing is not None
            else await self.weighing.weigh_round(runtime, command)
        )
        judgement = _digest_of(weighed_round.weighing)
        log.info(
            "updates were judged",
            job_id=runtime.job.job_id,
            round=command.round,
            judgement=judgement,
        )
        failpoint("aggregate.judged")
        if weighed_round.weighing.rollback and command.fallback is not None:
            return _earlier_model(command, command.fallback, weighed_round)
        counted_command = counted_updates(command, weighed_round)
        log.info("an outer step", job_id=runtime.job.job_id, reason=command.outer_reason)
        aggregated_round = await self._fold_until_done(runtime, counted_command)
        event = replace(
            aggregated_round.event,
            weighing=weighed_round.weighing,
            agreement=weighed_round.agreement,
            omitted=(*aggregated_round.event.omitted, *weighed_round.unreadable),
        )
        return aggregated_round._replace(event=event)

    async def _fold_until_done(self, runtime: JobRuntime, command: Aggregate) -> AggregatedRound:
        """Fold until it works: a full disk is waited out.

        Raises:
            BaseDamagedError: The model before is missing or damaged.
        """
        layout = runtime.required_layout
        while True:
            try:
                return await self._fold_in_thread(layout, command)
            except (HyperGPUError, OSError) as error:
                runtime.obstacle = str(error)
                log.warning("a fold waits", job_id=runtime.job.job_id, reason=str(error))
                await asyncio.sleep(_RETRY_S)

    async def _fold_in_thread(self, layout: Layout, command: Aggregate) -> AggregatedRound:
        """Fold in a thread, which cannot be cancelled: a result that is not awaited is unpinned."""
        fold_task = asyncio.ensure_future(
            self.heavy.run(partial(self.fold_updates, layout, command))
        )

        def abandon(folding: "asyncio.Future[AggregatedRound]") -> None:
            if not folding.cancelled() and folding.exception() is None:
                self.storage.pins.drop(folding.result().pinned)

        try:
            return await asyncio.shield(fold_task)
        except asyncio.CancelledError:
            fold_task.add_done_callback(abandon)
            raise

    async def _sync_base(self, runtime: JobRuntime, base: Model) -> None:
        """See to it that a power cut leaves the base: the model made of it may still be lost.

        It was synced when it was new; this finds something to do only where that failed.
        """
        digests = [blob.digest for blob in base.newest_blobs]
        while failure := await asyncio.to_thread(self._sync, digests):
            runtime.obstacle = failure
            log.warning("a fold waits for its base", job_id=runtime.job.job_id, reason=failure)
            await asyncio.sleep(_RETRY_S)

    def fold_updates(self, layout: Layout, command: Aggregate) -> AggregatedRound:
        """Fold once, into blobs that the caller unpins. Blocks.

        Raises:
            HyperGPUError: DISK_FULL; nothing is left behind.
            BaseDamagedError: The model before is missing or damaged.
            OSError: The disk fails.
        """
        usable, omitted_updates = self._usable_updates(command.updates)
        base, is_partial = command.base, bool(command.base.held_parts)
        if is_partial:
            usable, damaged_updates = sound_updates(layout, usable)
            omitted_updates += damaged_updates
        nodes = [update.node for update, _ in usable]
        request = FoldRequest(
            layout=layout,
            down="fp32" if is_partial else command.down,
            outer=command.outer,
            scale=command.scale,
            base_model=stored_base(self.storage.blobs, base.blob),
            outer_state=(
                stored_base(self.storage.blobs, base.outer_state) if base.outer_state else None
            ),
            updates=tuple(stored_update for _, stored_update in usable),
            output_dir=self.storage.blobs.work_path("fold").parent,
        )
        try:
            if is_partial:
                base_path = request.base_model.path
                with merged_update(layout, command, base_path, usable) as updates:
                    result = self._fold(replace(request, updates=updates))
            else:
                result = self._fold(request)
        except NoUpdatesError as none_left:
            omitted_updates += [(nodes[each.index], each.reason) for each in none_left.omitted]
            return _unchanged_model(command, omitted_updates)
        except DivergedError as error:
            omitted_updates += [(node, str(error)) for node in nodes]
            return _unchanged_model(command, omitted_updates)
        failpoint("aggregate.folded")
        omitted_updates += [(nodes[each.index], each.reason) for each in result.omitted]
        parts = self._next_parts(layout, command, result) if is_partial else NO_PARTS
        files = (*result.files, *parts.files)
        pinned_digests = self._pin(files)
        model = self._adopt_files(command, result, files)
        event = AggregateReady(
            at_ms=Milliseconds(0),
            round=command.round,
            model=replace(model, parts=parts.parts) if is_partial else model,
            omitted=tuple(omitted_updates),
        )
        return AggregatedRound(event, pinned_digests)

    def _fold(self, request: FoldRequest) -> FoldResult:
        engine = self.heavy.engine_for(request.layout.parameters_count)
        return fold_by(engine, request, self.storage.blobs.reuse)

    def _next_parts(self, layout: Layout, command: Aggregate, result: FoldResult) -> MadeParts:
        """Make the parts of the next model, or leave nothing of the fold."""
        try:
            return next_parts(command, result.model, layout, self.storage.blobs)
        except BaseException:
            for file in result.files:
                file.path.unlink(missing_ok=True)
            raise

    def _usable_updates(
        self, updates: tuple[FoldedUpdate, ...]
    ) -> tuple[list[tuple[FoldedUpdate, StoredUpdate]], list[tuple[NodeId, str]]]:
        """Updates that are on disk, and those that the blob store already knows to be damaged."""
        usable: list[tuple[FoldedUpdate, StoredUpdate]] = []
        omitted_updates: list[tuple[NodeId, str]] = []
        for update in updates:
            try:
                path = self.storage.blobs.path(update.blob.digest)
            except HyperGPUError as error:
                if error.reason is not Reason.BLOB_UNKNOWN:
                    raise
                omitted_updates.append((update.node, error.detail))
            else:
                stored_update = StoredUpdate(
                    path, update.blob.digest, update.weight, update.codec, update.clip
                )
                usable.append((update, stored_update))
        return usable, omitted_updates

    def _pin(self, files: tuple[FoldedFile, ...]) -> tuple[Digest, ...]:
        pinned_digests = tuple(file.digest for file in files)
        self.storage.pins.add(pinned_digests)
        return pinned_digests

    def _adopt_files(
        self, command: Aggregate, result: FoldResult, files: tuple[FoldedFile, ...]
    ) -> Model:
        """Turn the fold's pinned files, and what was made of them, into blobs, or leave nothing.

        A power cut may lose them: they can be folded again.
        """
        blobs = {file: BlobRef(file.digest, file.size_bytes) for file in files}
        try:
            for file, blob in blobs.items():
                self.storage.blobs.adopt_unsynced(file.path, blob, keep_s=_KEEP_S)
                if file is result.model:
                    failpoint("aggregate.model_stored")
        except BaseException:
            self.storage.pins.drop(file.digest for file in files)
            for file in files:
                file.path.unlink(missing_ok=True)
            raise
        failpoint("aggregate.stored")
        deltas: tuple[Delta, ...] = ()
        if result.delta is not None:
            delta = Delta(command.base.blob.digest, blobs[result.delta], command.down)
            deltas = extend_chain(command.base, delta, result.model.size_bytes)
        outer_state = blobs[result.outer_state] if result.outer_state is not None else None
        return Model(command.base.round + 1, blobs[result.model], outer_state, deltas)

    def _sync(self, digests: Iterable[Digest]) -> str:
        """Make blobs durable. Returns why one is not; empty when all are, or are gone."""
        why = ""
        for digest in digests:
            try:
                self.storage.blobs.sync(digest)
            except HyperGPUError as error:
                if error.reason is not Reason.BLOB_UNKNOWN:
                    why = error.detail
            except OSError as error:
                why = f"{digest}: {error}"
        return why


def _digest_of(weighing: Weighing) -> str:
    """What tells one judgement from another in a log: the same one has the same bits."""
    return blake3(msgspec.msgpack.encode(weighing, order="deterministic")).hexdigest(8)


def counted_updates(command: Aggregate, weighed: WeighedRound) -> Aggregate:
    """The command with each update's vote and clip; those that count nothing are left out."""
    unreadable = dict(weighed.unreadable)
    readable = [update for update in command.updates if update.node not in unreadable]
    return replace(command, updates=weighted_updates(readable, weighed.weighing))


def weighted_updates(
    updates: Iterable[FoldedUpdate], weighing: Weighing
) -> tuple[FoldedUpdate, ...]:
    """The updates that count, each with its vote and clip."""
    voted_updates = [
        replace(
            update,
            weight=update.weight * weighing.votes.get(update.node, WHOLE),
            clip=weighing.clips.get(update.node, WHOLE),
            full_weight=update.weight * WHOLE,
        )
        for update in updates
    ]
    return tuple(each for each in voted_updates if each.weight and each.clip)


def _earlier_model(command: Aggregate, model: Model, weighed: WeighedRound) -> AggregatedRound:
    """The round counts, and the job goes on from the model before its base."""
    event = AggregateReady(
        at_ms=Milliseconds(0),
        round=command.round,
        model=Model(
            command.base.round + 1, model.blob, model.outer_state, parts=_without_deltas(model)
        ),
        weighing=weighed.weighing,
    )
    return AggregatedRound(event)


def _without_deltas(model: Model) -> tuple[ModelPart, ...] | msgspec.UnsetType:
    """The parts of a model that was there before: nodes fetch it whole."""
    if model.parts is msgspec.UNSET:
        return msgspec.UNSET
    return tuple(replace(each, deltas=()) for each in model.parts)


def _unchanged_model(command: Aggregate, omitted: list[tuple[NodeId, str]]) -> AggregatedRound:
    """The round counts, the model stays."""
    base = command.base
    model = replace(base, round=base.round + 1)
    event = AggregateReady(
        at_ms=Milliseconds(0), round=command.round, model=model, omitted=tuple(omitted)
    )
    return AggregatedRound(event)

"""`Aggregate`: fold the closed round's updates into the next model, in a thread, and report it."""

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import structlog
from msgspec.structs import replace

from coordinator.core.training.job.chain import extend_chain
from coordinator.core.training.job.commands import Aggregate, FoldedUpdate
from coordinator.core.training.job.events import AggregateReady
from coordinator.core.training.job.state import Model
from coordinator.core.training.job.trust_memory import Weighing
from coordinator.core.training.trust.weights import WHOLE, is_hopeless
from coordinator.core.work.work_events import JobPaused
from coordinator.shell.aggregation.fold_request import (
    BaseDamagedError,
    DivergedError,
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
            aggregated = await self._weigh_and_fold(runtime, command)
        except BaseDamagedError as damaged:
            lost = command.base.blob.digest
            await report_lost_model(self.driver, runtime.job.job_id, lost, str(damaged))
            return
        served_bytes = runtime.bytes_down
        draw = self.weighing.round_draw(runtime.job.job_id, command.round + 1)
        event = replace(aggregated.event, bytes_down=served_bytes, draw=draw)
        try:
            await self._sync_base(runtime, command.base)
            reason = await self.driver.report(runtime.job.job_id, event)
        finally:
            self.storage.pins.drop(aggregated.pinned)
        if reason:
            return
        self.weighing.prepare_gradient(runtime)
        runtime.bytes_down = Bytes(runtime.bytes_down - served_bytes)
        if failed := await asyncio.to_thread(self._sync, aggregated.pinned):
            log.warning("a model is not durable yet", job_id=runtime.job.job_id, reason=failed)
        memory = runtime.job.trust
        if event.weighing is not None and event.weighing.rollback and is_hopeless(memory):
            why = f"{event.weighing.rollback}, {memory.rollbacks} times in a row: {_HOPELESS}"
            await self.driver.report(
                runtime.job.job_id, JobPaused(at_ms=Milliseconds(0), reason=why)
            )

    async def _weigh_and_fold(self, runtime: JobRuntime, command: Aggregate) -> AggregatedRound:
        """Weigh the updates, unless they were folded before, and fold those that count.

        Raises:
            BaseDamagedError: The model before is missing or damaged.
        """
        weighed = (
            WeighedRound(command.weighing)
            if command.weighing is not None
            else await self.weighing.weigh_round(runtime, command)
        )
        if weighed.weighing.rollback and command.fallback is not None:
            return _earlier_model(command, command.fallback, weighed)
        counted = counted_updates(command, weighed)
        log.info("an outer step", job_id=runtime.job.job_id, reason=command.outer_reason)
        aggregated = await self._fold_until_done(runtime, counted)
        event = replace(
            aggregated.event,
            weighing=weighed.weighing,
            agreement=weighed.agreement,
            omitted=(*aggregated.event.omitted, *weighed.unreadable),
        )
        return aggregated._replace(event=event)

    async def _fold_until_done(self, runtime: JobRuntime, command: Aggregate) -> AggregatedRound:
        """Fold until it works: a full disk is waited out.

        Raises:
            BaseDamagedError: The model before is missing or damaged.
        """
        layout = runtime.required_layout
        while True:
            try:
                return await self._fold_in_thread(layout, command)
            except (HyperGPUError, OSError) as failed:
                runtime.obstacle = str(failed)
                log.warning("a fold waits", job_id=runtime.job.job_id, reason=str(failed))
                await asyncio.sleep(_RETRY_S)

    async def _fold_in_thread(self, layout: Layout, command: Aggregate) -> AggregatedRound:
        """Fold in a thread, which cannot be cancelled: a result that is not awaited is unpinned."""
        folding = asyncio.ensure_future(self.heavy.run(partial(self.fold_updates, layout, command)))

        def abandon(folding: "asyncio.Future[AggregatedRound]") -> None:
            if not folding.cancelled() and folding.exception() is None:
                self.storage.pins.drop(folding.result().pinned)

        try:
            return await asyncio.shield(folding)
        except asyncio.CancelledError:
            folding.add_done_callback(abandon)
            raise

    async def _sync_base(self, runtime: JobRuntime, base: Model) -> None:
        """See to it that a power cut leaves the base: the model made of it may still be lost.

        It was synced when it was new; this finds something to do only where that failed.
        """
        digests = [blob.digest for blob in base.newest_blobs]
        while failed := await asyncio.to_thread(self._sync, digests):
            runtime.obstacle = failed
            log.warning("a fold waits for its base", job_id=runtime.job.job_id, reason=failed)
            await asyncio.sleep(_RETRY_S)

    def fold_updates(self, layout: Layout, command: Aggregate) -> AggregatedRound:
        """Fold once, into blobs that the caller unpins. Blocks.

        Raises:
            HyperGPUError: DISK_FULL; nothing is left behind.
            BaseDamagedError: The model before is missing or damaged.
            OSError: The disk fails.
        """
        usable, omitted = self._usable_updates(command.updates)
        nodes = [update.node for update, _ in usable]
        outer_state = command.base.outer_state
        request = FoldRequest(
            layout=layout,
            down=command.down,
            outer=command.outer,
            scale=command.scale,
            base_model=stored_base(self.storage.blobs, command.base.blob),
            outer_state=stored_base(self.storage.blobs, outer_state) if outer_state else None,
            updates=tuple(stored for _, stored in usable),
            output_dir=self.storage.blobs.work_path("fold").parent,
        )
        try:
            engine = self.heavy.engine_for(layout.parameters_count)
            result = fold_by(engine, request, self.storage.blobs.reuse)
        except NoUpdatesError as none_left:
            omitted += [(nodes[each.index], each.reason) for each in none_left.omitted]
            return _unchanged_model(command, omitted)
        except DivergedError as diverged:
            omitted += [(node, str(diverged)) for node in nodes]
            return _unchanged_model(command, omitted)
        failpoint("aggregate.folded")
        omitted += [(nodes[each.index], each.reason) for each in result.omitted]
        pinned = self._pin(result)
        event = AggregateReady(
            at_ms=Milliseconds(0),
            round=command.round,
            model=self._adopt_files(command, result),
            omitted=tuple(omitted),
        )
        return AggregatedRound(event, pinned)

    def _usable_updates(
        self, updates: tuple[FoldedUpdate, ...]
    ) -> tuple[list[tuple[FoldedUpdate, StoredUpdate]], list[tuple[NodeId, str]]]:
        """Updates that are on disk, and those that the blob store already knows to be damaged."""
        usable: list[tuple[FoldedUpdate, StoredUpdate]] = []
        omitted: list[tuple[NodeId, str]] = []
        for update in updates:
            try:
                path = self.storage.blobs.path(update.blob.digest)
            except HyperGPUError as missing:
                if missing.reason is not Reason.BLOB_UNKNOWN:
                    raise
                omitted.append((update.node, missing.detail))
            else:
                stored = StoredUpdate(
                    path, update.blob.digest, update.weight, update.codec, update.clip
                )
                usable.append((update, stored))
        return usable, omitted

    def _pin(self, result: FoldResult) -> tuple[Digest, ...]:
        pinned = tuple(file.digest for file in result.files)
        self.storage.pins.add(pinned)
        return pinned

    def _adopt_files(self, command: Aggregate, result: FoldResult) -> Model:
        """Turn the fold's pinned files into blobs, or leave nothing of them.

        A power cut may lose them: they can be folded again.
        """
        blobs = {file: BlobRef(file.digest, file.size_bytes) for file in result.files}
        try:
            for file, blob in blobs.items():
                self.storage.blobs.adopt_unsynced(file.path, blob, keep_s=_KEEP_S)
                if file is result.model:
                    failpoint("aggregate.model_stored")
        except BaseException:
            self.storage.pins.drop(file.digest for file in result.files)
            for file in result.files:
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
            except HyperGPUError as refused:
                if refused.reason is not Reason.BLOB_UNKNOWN:
                    why = refused.detail
            except OSError as failed:
                why = f"{digest}: {failed}"
        return why


def counted_updates(command: Aggregate, weighed: WeighedRound) -> Aggregate:
    """The command with each update's vote and clip; those that count nothing are left out."""
    unreadable = dict(weighed.unreadable)
    readable = [update for update in command.updates if update.node not in unreadable]
    return replace(command, updates=weighted_updates(readable, weighed.weighing))


def weighted_updates(
    updates: Iterable[FoldedUpdate], weighing: Weighing
) -> tuple[FoldedUpdate, ...]:
    """The updates that count, each with its vote and clip."""
    weighted = [
        replace(
            update,
            weight=update.weight * weighing.votes.get(update.node, WHOLE),
            clip=weighing.clips.get(update.node, WHOLE),
        )
        for update in updates
    ]
    return tuple(each for each in weighted if each.weight and each.clip)


def _earlier_model(command: Aggregate, model: Model, weighed: WeighedRound) -> AggregatedRound:
    """The round counts, and the job goes on from the model before its base."""
    event = AggregateReady(
        at_ms=Milliseconds(0),
        round=command.round,
        model=Model(command.base.round + 1, model.blob, model.outer_state),
        weighing=weighed.weighing,
    )
    return AggregatedRound(event)


def _unchanged_model(command: Aggregate, omitted: list[tuple[NodeId, str]]) -> AggregatedRound:
    """The round counts, the model stays."""
    base = command.base
    model = Model(base.round + 1, base.blob, base.outer_state, base.deltas)
    event = AggregateReady(
        at_ms=Milliseconds(0), round=command.round, model=model, omitted=tuple(omitted)
    )
    return AggregatedRound(event)

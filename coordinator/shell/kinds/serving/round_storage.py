"""Rounds of a training through a ring: adapters as blobs, the journal's word, and receipts."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import NamedTuple

import numpy as np

from coordinator.core.rings.training_ring import RingPlan
from coordinator.core.serving.events import RingRoundStored
from coordinator.core.serving.state import ServeJob
from coordinator.core.work.work_events import StampedEvent
from coordinator.shell.kinds.serving.ring_orders import RingOrders
from coordinator.shell.kinds.serving.ring_parts import StageSeat
from coordinator.shell.kinds.serving.round_losses import RoundLosses
from coordinator.shell.kinds.serving.runtime import ServeRuntime
from coordinator.shell.kinds.serving.token_counter import (
    CountedPart,
    CountWindow,
    ReportCount,
    UnitTally,
)
from coordinator.shell.kinds.serving.training_batches import (
    HeldOutBatches,
    TrainingBatches,
    TrainingRows,
)
from coordinator.shell.store.storage import Storage
from hypergpu.blobs import BlobRef
from hypergpu.digests import digest_of
from hypergpu.rings.ring_training import HELD_OUT_ROWS, TRAINING_ROWS, RingTraining
from hypergpu.rings.stage_work import layer_blob
from hypergpu.serving.calls import ModelCall
from hypergpu.serving.stage_messages import StageRefused, StageReply
from hypergpu.serving.training_messages import AdapterKept, GiveAdapter
from hypergpu.token_counts import TokenCount
from hypergpu.units import Milliseconds

READ_PER_TRAINED = 3
"""Tokens that are counted as read for one that is trained: forward once, and backward twice. One
that is held out counts as itself.
"""
_NOW = Milliseconds(0)  # stamped by the driver


class TrainerPorts(NamedTuple):
    """What a training through a ring needs of its coordinator."""

    storage: Storage
    report: Callable[[StampedEvent], Awaitable[str]]
    """Has an event decided on and journalled; gives why it was rejected, or nothing."""
    report_count: ReportCount


class StoredLayers(NamedTuple):
    """What stages gave of their layers."""

    adapter: dict[str, BlobRef]
    """By the names of the layers' files; empty: a stage is at fault."""
    faulty_stage: int | None = None
    fault: str = ""


def stored_layer(job: ServeJob, storage: Storage, layer: int) -> bytes:
    """The adapter of a layer in the newest stored round, as its stage gave it. Blocks.

    Raises:
        ValueError: No round is stored.
    """
    if job.stored_round is None:
        raise ValueError("no round is stored")
    blob = job.stored_round.adapter[layer_blob(layer)]
    return storage.blobs.path(blob.digest).read_bytes()


class RoundStorage(NamedTuple):
    """The rounds of one job."""

    runtime: ServeRuntime
    ports: TrainerPorts
    tally: UnitTally
    """Units that are counted and not yet journalled."""

    async def store_layers(
        self,
        orders: RingOrders,
        seats: Mapping[int, StageSeat],
        kept_step: int,
        round_step: int,
    ) -> "StoredLayers":
        """Store what stages kept of their layers.

        Args:
            orders: Of their ring.
            seats: The stages.
            kept_step: Steps after which it was kept.
            round_step: Steps so far at the end of the round whose event will name it.
        """
        adapter = dict[str, BlobRef]()
        for stage, seat in sorted(seats.items()):
            for layer in range(seat.span.first, seat.span.end):
                reply = await orders.ask(stage, seat, GiveAdapter(kept_step, layer))
                if not isinstance(reply, AdapterKept) or not reply.content:
                    fault = f"it did not give its adapter: {reason_of(reply)}"
                    return StoredLayers({}, stage, fault)
                if fault := self._content_fault(layer, reply.content):
                    return StoredLayers({}, stage, fault)
                blob = await asyncio.to_thread(self.put, reply.content, round_step)
                adapter[layer_blob(layer)] = blob
        return StoredLayers(adapter)

    def _content_fault(self, layer: int, content: bytes) -> str:
        """Why what a stage gave cannot be the adapter of a layer; empty: it can."""
        stored_round = self.runtime.job.stored_round
        if stored_round is not None:
            size_bytes = stored_round.adapter[layer_blob(layer)].size_bytes
            if len(content) != size_bytes:
                return f"its adapter of layer {layer} has {len(content)} bytes, not {size_bytes}"
        is_whole = len(content) % 4 == 0 and bool(np.isfinite(np.frombuffer(content, "<f4")).all())
        return "" if is_whole else f"its adapter of layer {layer} is not finite"

    def put(self, content: bytes, step: int) -> BlobRef:
        """Store what the event of a round will name, and have it kept until then. Blocks."""
        self.runtime.open_digests[digest_of(content)] = step
        return self.ports.storage.blobs.put(content)

    def read(self, blob: BlobRef) -> bytes:
        """What was stored. Blocks."""
        return self.ports.storage.blobs.path(blob.digest).read_bytes()

    async def report(self, event: RingRoundStored) -> str:
        """Have a round decided on and journalled; gives why it was rejected, or nothing."""
        if reason := await self.ports.report(event):
            return reason
        digests = self.runtime.open_digests
        for digest, step in tuple(digests.items()):  # Threads may add to it meanwhile.
            if step <= event.step:
                del digests[digest]
        return ""

    def read_rows(self, training: RingTraining, ring: int) -> TrainingRows:
        """The rows that a ring trains, and those that are held out. Blocks.

        Raises:
            HyperGPUError: REQUEST_INVALID, their files are none such.
        """
        files, blobs = self.runtime.job.request.files, self.ports.storage.blobs
        held_out = files.get(HELD_OUT_ROWS)
        return TrainingRows(
            TrainingBatches(blobs.path(files[TRAINING_ROWS].digest), training, ring),
            None if held_out is None else HeldOutBatches(blobs.path(held_out.digest), training),
        )

    def count_tokens(self, seats: Iterable[StageSeat], read_tokens: int, step: int) -> None:
        """Count a round's tokens for the nodes that hold the stages at its end.

        Args:
            seats: The stages.
            read_tokens: Tokens that are counted as read.
            step: Steps so far.
        """
        job = self.runtime.job
        if not job.has_receipts:
            return
        for seat in seats:
            if not seat.stream.signs_counts:
                continue
            part = CountedPart.of(job, seat.span)
            window = CountWindow(seat.node, seat.lease, self.ports.report_count, part)
            window.add(TokenCount(prompt_tokens=read_tokens))
            window.link(ModelCall(tokens=(step,)), [])
            self.tally.units += window.count.units
            window.end()


def reason_of(reply: StageReply) -> str:
    """What a stage said in place of what it was asked for."""
    return reply.reason if isinstance(reply, StageRefused) else f"it gave {type(reply).__name__}"


def plan_of(training: RingTraining) -> RingPlan:
    """What a ring of a training has to do; rows that are held out are not read yet."""
    return RingPlan(
        training.steps,
        training.micro_batches,
        training.inner_steps,
        training.clip_norm,
        is_folded=training.rings > 1,
    )


def round_event(
    training: RingTraining,
    rows: TrainingRows,
    step: int,
    losses: RoundLosses,
    adapter: Mapping[str, BlobRef],
    figures: str,
) -> RingRoundStored:
    """The event of a round that is over.

    Args:
        training: Settings.
        rows: Its rows.
        step: Steps so far.
        losses: What the last stage gave.
        adapter: Blobs of all layers.
        figures: What was forecast.
    """
    rounds = -(-step // training.inner_steps)
    steps = range((rounds - 1) * training.inner_steps, step)
    totals = rows.train.totals(steps)
    return RingRoundStored(
        at_ms=_NOW,
        rounds=rounds,
        step=step,
        loss=losses.mean(steps, totals.counted_tokens),
        tokens=totals.tokens,
        adapter=adapter,
        figures=figures,
        held_out_loss=losses.held_out_mean(step, rows.held_out_totals),
    )

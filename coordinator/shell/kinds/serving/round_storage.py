"""Rounds of a training through a ring: adapters as blobs, the journal's word, and receipts."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import NamedTuple

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
from hypergpu.rings.ring_training import HELD_OUT_ROWS, TRAINING_ROWS, RingTraining
from hypergpu.rings.stage_work import layer_blob
from hypergpu.serving.calls import ModelCall
from hypergpu.serving.stage_messages import StageReply
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
    orders: RingOrders
    ports: TrainerPorts
    tally: UnitTally
    """Units that are counted and not yet journalled."""

    async def store_stage(
        self, stage: int, seat: StageSeat, step: int
    ) -> tuple[dict[str, BlobRef], StageReply | None]:
        """Store what a stage kept of its layers; gives the blobs by the names of the layers' files,
        and the answer by which the stage is at fault, if it is.
        """
        blobs = dict[str, BlobRef]()
        for layer in range(seat.span.first, seat.span.end):
            reply = await self.orders.ask(stage, seat, GiveAdapter(step, layer))
            if not isinstance(reply, AdapterKept) or not reply.content:
                return blobs, reply
            put = self.ports.storage.blobs.put
            blobs[layer_blob(layer)] = await asyncio.to_thread(put, reply.content)
        return blobs, None

    def stored_layer(self, layer: int) -> bytes:
        """See the function of the same name."""
        return stored_layer(self.runtime.job, self.ports.storage, layer)

    def read_rows(self, training: RingTraining) -> TrainingRows:
        """The rows of the job. Blocks.

        Raises:
            HyperGPUError: REQUEST_INVALID, their files are none such.
        """
        files, blobs = self.runtime.job.request.files, self.ports.storage.blobs
        held_out = files.get(HELD_OUT_ROWS)
        return TrainingRows(
            TrainingBatches(blobs.path(files[TRAINING_ROWS].digest), training),
            None if held_out is None else HeldOutBatches(blobs.path(held_out.digest), training),
        )

    def count_tokens(self, seats: Mapping[int, StageSeat], read_tokens: int, step: int) -> None:
        """Count a round's tokens for the nodes that hold the stages at its end.

        Args:
            seats: Their nodes.
            read_tokens: Tokens that are counted as read.
            step: Steps so far.
        """
        job = self.runtime.job
        if not job.has_receipts:
            return
        for seat in seats.values():
            if not seat.stream.signs_counts:
                continue
            part = CountedPart.of(job, seat.span)
            window = CountWindow(seat.node, seat.lease, self.ports.report_count, part)
            window.add(TokenCount(prompt_tokens=read_tokens))
            window.link(ModelCall(tokens=(step,)), [])
            self.tally.units += window.count.units
            window.end()


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
    totals = [rows.train.step_totals(each) for each in steps]
    return RingRoundStored(
        at_ms=_NOW,
        rounds=rounds,
        step=step,
        loss=losses.mean(steps, sum(each.counted_tokens for each in totals)),
        tokens=sum(each.tokens for each in totals),
        adapter=adapter,
        figures=figures,
        held_out_loss=losses.held_out_mean(step, rows.held_out_totals),
    )

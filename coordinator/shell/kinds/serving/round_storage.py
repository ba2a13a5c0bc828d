"""Rounds of a training through a ring: adapters as blobs, the journal's word, and receipts."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from fractions import Fraction
from typing import NamedTuple

from coordinator.core.serving.events import RingRoundStored
from coordinator.core.work.work_events import StampedEvent
from coordinator.shell.kinds.serving.ring_orders import RingOrders
from coordinator.shell.kinds.serving.ring_parts import StageSeat
from coordinator.shell.kinds.serving.runtime import ServeRuntime
from coordinator.shell.kinds.serving.token_counter import CountWindow, ReportCount, UnitTally
from coordinator.shell.kinds.serving.training_batches import TrainingBatches
from coordinator.shell.store.storage import Storage
from hypergpu.blobs import BlobRef
from hypergpu.rings.ring_training import RingTraining
from hypergpu.rings.stage_work import layer_blob
from hypergpu.serving.calls import ModelCall
from hypergpu.serving.stage_messages import StageReply
from hypergpu.serving.training_messages import AdapterKept, GiveAdapter
from hypergpu.token_counts import TokenCount
from hypergpu.units import Milliseconds

_READ_PER_TRAINED = 3
"""Tokens that are counted as read for one that is trained: forward once, and backward twice."""
_NOW = Milliseconds(0)  # stamped by the driver


class TrainerPorts(NamedTuple):
    """What a training through a ring needs of its coordinator."""

    storage: Storage
    report: Callable[[StampedEvent], Awaitable[str]]
    """Has an event decided on and journalled; gives why it was rejected, or nothing."""
    report_count: ReportCount


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
        """The adapter of a layer in the newest stored round. Blocks.

        Raises:
            ValueError: No round is stored.
        """
        stored_round = self.runtime.job.stored_round
        if stored_round is None:
            raise ValueError("no round is stored")
        blob = stored_round.adapter[layer_blob(layer)]
        return self.ports.storage.blobs.path(blob.digest).read_bytes()

    def count_tokens(self, seats: Mapping[int, StageSeat], tokens: int, step: int) -> None:
        """Count a round's tokens for the nodes that hold the stages at its end."""
        cut = self.runtime.job.request.cut
        if cut is None or not self.runtime.job.has_receipts:
            return
        for seat in seats.values():
            if not seat.stream.signs_counts:
                continue
            share = Fraction(seat.span.count, cut.layers)
            window = CountWindow(seat.node, seat.lease, self.ports.report_count, share)
            window.add(TokenCount(prompt_tokens=_READ_PER_TRAINED * tokens))
            window.link(ModelCall(tokens=(step,)), [])
            self.tally.units += window.count.units
            window.end()


def round_event(
    training: RingTraining,
    batches: TrainingBatches,
    step: int,
    losses: Mapping[int, float],
    adapter: Mapping[str, BlobRef],
    figures: str,
) -> RingRoundStored:
    """The event of a round that is over.

    Args:
        training: Settings.
        batches: Its rows.
        step: Steps so far.
        losses: By step, the sum over tokens that count.
        adapter: Blobs of all layers.
        figures: What was forecast.
    """
    rounds = -(-step // training.inner_steps)
    steps = range((rounds - 1) * training.inner_steps, step)
    totals = [batches.step_totals(each) for each in steps]
    return RingRoundStored(
        at_ms=_NOW,
        rounds=rounds,
        step=step,
        loss=sum(losses.get(each, 0.0) for each in steps)
        / max(1, sum(each.counted_tokens for each in totals)),
        tokens=sum(each.tokens for each in totals),
        adapter=adapter,
        figures=figures,
    )

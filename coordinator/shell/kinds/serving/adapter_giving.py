"""Gives stages of a ring the adapter that it goes on from."""

import asyncio
from collections.abc import Callable, Mapping
from typing import NamedTuple

from coordinator.shell.kinds.serving.folded_rounds import FoldedRounds
from coordinator.shell.kinds.serving.ring_orders import RingOrders
from coordinator.shell.kinds.serving.ring_parts import StageSeat
from coordinator.shell.kinds.serving.round_storage import RoundStorage, reason_of
from hypergpu.blobs import BlobRef
from hypergpu.rings.stage_work import layer_blob
from hypergpu.serving.stage_messages import StageReply
from hypergpu.serving.training_messages import (
    AdapterReady,
    KeepAdapter,
    TakeAdapter,
    UseAdapter,
)


class GivenAdapter(NamedTuple):
    """What came of it."""

    is_there: bool
    fault: str = ""
    """Why the stage is at fault; empty: it is not."""


_ABANDONED = GivenAdapter(is_there=False)


class AdapterGiving(NamedTuple):
    """Gives adapters to the stages of a ring."""

    orders: RingOrders
    rounds: RoundStorage
    folding: FoldedRounds | None
    """Rounds of several rings; None: the training has one."""
    ring: int

    async def give(
        self, stage: int, seat: StageSeat, step: int, is_wanted: Callable[[], bool]
    ) -> GivenAdapter:
        """Have a stage go on from a stored round, or from the seed's adapter.

        Args:
            stage: The stage.
            seat: Its node.
            step: Steps that the round is after.
            is_wanted: Whether the ring still goes on from it: looked at before anything is sent.
        """
        # What a stage of several rings has kept itself is not what was folded.
        if self.folding is None or not step:
            reply = await self.orders.ask(stage, seat, UseAdapter(step))
            if reply != AdapterReady(is_there=False):
                return await self._outcome_of(stage, seat, step, reply)
        for layer in range(seat.span.first, seat.span.end):
            blob = self._adapter(step).get(layer_blob(layer))
            if blob is None or not is_wanted():
                return _ABANDONED
            content = await asyncio.to_thread(self.rounds.read, blob)
            if not is_wanted():
                return _ABANDONED
            reply = await self.orders.ask(stage, seat, TakeAdapter(step, layer, content))
            if reply != AdapterReady():
                return _fault_of(reply)
        if not is_wanted():
            return _ABANDONED
        reply = await self.orders.ask(stage, seat, UseAdapter(step))
        return await self._outcome_of(stage, seat, step, reply)

    async def _outcome_of(
        self, stage: int, seat: StageSeat, step: int, reply: StageReply
    ) -> GivenAdapter:
        if reply == AdapterReady() and self.folding is not None and not step:
            # The first fold needs what the seed gives.
            reply = await self.orders.ask(stage, seat, KeepAdapter(0))
        return GivenAdapter(is_there=True) if reply == AdapterReady() else _fault_of(reply)

    def _adapter(self, step: int) -> Mapping[str, BlobRef]:
        """Layers after so many steps; empty: a later round is folded already."""
        if self.folding is not None:
            is_newest = self.folding.newest_step == step
            return self.folding.adapter_of(self.ring) if is_newest else {}
        stored_round = self.rounds.runtime.job.stored_round
        return {} if stored_round is None else stored_round.adapter


def _fault_of(reply: StageReply) -> GivenAdapter:
    return GivenAdapter(is_there=False, fault=f"it could not take the adapter: {reason_of(reply)}")

"""Plans a round, as a command asks."""

import asyncio
from dataclasses import dataclass

from msgspec.structs import replace

from coordinator.config import Settings
from coordinator.core.training.job.commands import PlanRound
from coordinator.core.training.job.events import RoundPlanned
from coordinator.core.training.plan.decision import ModelSizes, PlanRequest
from coordinator.core.training.plan.planning import plan_round
from coordinator.core.training.plan.uploads import payload_bits_per_s
from coordinator.shell.driver.driver import Driver
from coordinator.shell.kinds.training.job_runtime import JobRuntime
from coordinator.shell.kinds.training.speed_keys import speed_sources
from coordinator.shell.nodes.fleet import Fleet
from hypergpu.jobfile.spec import CODECS
from hypergpu.tensors.codec import update_bytes
from hypergpu.tensors.layout import Layout
from hypergpu.units import Milliseconds


@dataclass(frozen=True)
class RoundPlanning:
    """Performs `PlanRound`."""

    driver: Driver
    fleet: Fleet
    settings: Settings

    async def plan(self, runtime: JobRuntime, command: PlanRound) -> None:
        """Answer the command with `RoundPlanned`."""
        pause_reasons = self.fleet.nodes.pause_reasons(runtime.job.members)
        request = replace(with_line(command.request, self.settings), paused=pause_reasons)
        sources = speed_sources(runtime.job, self.fleet.nodes.streams, request.candidates)
        readings = self.fleet.readings.readings(request.candidates, runtime.now_ms(), sources)
        round_plan = await asyncio.to_thread(
            plan_round, request, readings, sizes_of(runtime.node_layout)
        )
        event = RoundPlanned(at_ms=Milliseconds(0), plan=round_plan)
        await self.driver.report(runtime.job.job_id, event)


def with_line(request: PlanRequest, settings: Settings) -> PlanRequest:
    """The request with the capacity of this coordinator's line, as its settings state it."""
    line_bits_per_s = payload_bits_per_s(settings.line_mbit_s * 1_000_000)
    return replace(request, line_bits_per_s=line_bits_per_s)


def sizes_of(layout: Layout) -> ModelSizes:
    """Bytes to transfer for a model, by codec."""
    return ModelSizes({codec: update_bytes(layout, codec) for codec in CODECS}, layout.model_bytes)

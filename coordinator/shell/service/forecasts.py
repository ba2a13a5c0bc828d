"""Forecasts of jobs that are not created yet, and of those that run."""

import asyncio
from collections import OrderedDict

from msgspec.structs import replace

from coordinator.config import Settings
from coordinator.core.training.job.state import ENDED, Job
from coordinator.core.training.job_forecast.basis import ForecastBasis, ForecastRange, JobForecast
from coordinator.core.training.job_forecast.forecast import forecast_job
from coordinator.core.training.plan.uploads import payload_bits_per_s
from coordinator.shell.engine.heavy_work import HeavyWork
from coordinator.shell.kinds.training.command_times import CommandTimes
from coordinator.shell.kinds.training.demand import new_job_demand
from coordinator.shell.kinds.training.job_runtime import JobRuntime
from coordinator.shell.kinds.training.planning import sizes_of
from coordinator.shell.kinds.training.speed_keys import speed_sources
from coordinator.shell.kinds.training.workload_versions import catalogue_version
from coordinator.shell.nodes.fleet import Fleet
from coordinator.shell.service.calls import Caller
from coordinator.shell.service.model_layouts import ModelLayouts
from hypergpu.clock import monotonic_ms
from hypergpu.errors import HyperGPUError, Reason
from hypergpu.ids import JobId, NodeId, TokenId
from hypergpu.jobfile.reading import parse_spec_json
from hypergpu.jobfile.rules import covering
from hypergpu.jobfile.spec import JobSpec
from hypergpu.rates import Rate, RateLimiter
from hypergpu.tensors.layout import Layout
from hypergpu.units import Milliseconds, several
from hypergpu.v1 import forecast_pb2, job_pb2

_ESTIMATES = Rate(burst=10, interval_ms=Milliseconds(2_000))
"""Estimates of one token: each may cost half a second of a processor."""
_KEPT_MS = 5_000
"""A running job's forecast is told so long before it is made again."""
_FORECASTS_KEPT = 64


class JobForecasts:
    """Makes forecasts, one at a time."""

    def __init__(
        self,
        settings: Settings,
        fleet: Fleet,
        times: CommandTimes,
        heavy: HeavyWork,
        layouts: ModelLayouts,
    ) -> None:
        self._settings = settings
        self._fleet = fleet
        self._times = times
        self._heavy = heavy
        self._layouts = layouts
        self._rates = RateLimiter(_ESTIMATES)
        self._turn = asyncio.Lock()
        self._kept: OrderedDict[JobId, tuple[Milliseconds, JobForecast | None]] = OrderedDict()

    async def estimate(self, request: job_pb2.EstimateJobRequest, caller: Caller) -> JobForecast:
        """What a job would take with the nodes that are there.

        Raises:
            HyperGPUError: The settings are wrong, too few nodes fit, the model is not known, or
                the caller asks too often.
        """
        owner = caller.token.token_id if caller.token else TokenId("")
        if not self._rates.take(owner, monotonic_ms()):
            wait_ms = self._rates.wait_ms(owner, monotonic_ms())
            raise HyperGPUError(Reason.RATE_LIMITED, f"too many estimates: wait {wait_ms} ms")
        spec = parse_spec_json(request.spec_json)
        nodes, busy = self._nodes_for(spec)
        async with self._turn:
            layout = await self._layouts.layout_for(spec, request.parameters, owner)
            job = Job(
                job_id=JobId(""),
                spec=covering(spec, len(nodes)),
                layout=layout.digest,
                workload_version=catalogue_version(spec.workload),
            )
            basis = self._basis(job, layout, nodes, monotonic_ms())
            forecast = await self._heavy.run(lambda: forecast_job(basis))
        if isinstance(forecast, str):
            raise HyperGPUError(Reason.NODES_MISSING, forecast)
        if not busy:
            return forecast
        verb = "works" if busy == 1 else "work"
        reason = f"{forecast.reason}; {busy} of them {verb} for other jobs now: it may wait"
        return replace(forecast, reason=reason)

    async def of_job(self, runtime: JobRuntime) -> JobForecast | None:
        """What a job takes from now on; None where nothing can be said."""
        job, now_ms = runtime.job, monotonic_ms()
        if job.phase in ENDED or runtime.layout is None:
            return None
        made_ms, forecast = self._kept.get(job.job_id, (Milliseconds(-_KEPT_MS), None))
        if now_ms - made_ms >= _KEPT_MS:
            async with self._turn:
                made_ms, forecast = self._kept.get(job.job_id, (made_ms, forecast))
                if now_ms - made_ms >= _KEPT_MS:
                    made_ms, forecast = monotonic_ms(), await self._forecast(runtime)
                    self._keep(job.job_id, made_ms, forecast)
        if forecast is None:
            return None
        return _later(forecast, Milliseconds(monotonic_ms() - made_ms))

    async def _forecast(self, runtime: JobRuntime) -> JobForecast | None:
        job, now_ms = runtime.job, runtime.now_ms()
        nodes = [node for node, member in job.members.items() if member.can_work]
        newest = replace(job, spec=job.next_spec or job.spec)
        basis = self._basis(newest, runtime.required_layout, nodes, now_ms)
        forecast = await self._heavy.run(lambda: forecast_job(basis, job))
        return None if isinstance(forecast, str) else forecast

    def _keep(self, job_id: JobId, made_ms: Milliseconds, found: JobForecast | None) -> None:
        self._kept.pop(job_id, None)
        self._kept[job_id] = (made_ms, found)
        while len(self._kept) > _FORECASTS_KEPT:
            self._kept.popitem(last=False)

    def _nodes_for(self, spec: JobSpec) -> tuple[list[NodeId], int]:
        """Nodes that a new job would get, and how many of them work for other jobs."""
        offers, unfit = self._fleet.allocator.offers_for(new_job_demand(spec))
        needed_nodes = spec.training.nodes
        if len(offers) < needed_nodes:
            there = len(self._fleet.nodes.streams)
            if not there:
                fix = "connect one: hypergpu join"
                raise HyperGPUError(Reason.NODES_MISSING, "no node is connected", fix=fix)
            detail = f"training.nodes is {needed_nodes}, and of {several(there, 'connected node')}"
            detail += f" {len(offers)} can train it"
            detail += f"; another one cannot: {unfit}" if unfit else ""
            fix = f"set training.nodes to {max(1, len(offers))} or less, or connect more nodes"
            raise HyperGPUError(Reason.NODES_MISSING, detail, fix=fix)
        free = [offer for offer in offers if offer.job_id is None]
        chosen_offers = free if len(free) >= needed_nodes else offers
        chosen_offers = sorted(chosen_offers, key=lambda offer: -offer.health)
        chosen_offers = chosen_offers[: spec.nodes.max or None]
        return [offer.node for offer in chosen_offers], sum(
            each.job_id is not None for each in chosen_offers
        )

    def _basis(
        self, job: Job, layout: Layout, nodes: list[NodeId], now_ms: Milliseconds
    ) -> ForecastBasis:
        fleet, settings = self._fleet, self._settings
        sizes = sizes_of(layout)
        sources = speed_sources(job, fleet.nodes.streams, nodes)
        return ForecastBasis(
            spec=job.spec,
            readings=fleet.readings.readings(nodes, now_ms, sources),
            sizes=sizes,
            times=self._times.times_for(sizes.model_bytes),
            now_ms=now_ms,
            lost_after_ms=Milliseconds(settings.lost_after_ms),
            line_bits_per_s=payload_bits_per_s(settings.line_mbit_s * 1_000_000),
            paused=fleet.nodes.pause_reasons(nodes),
        )


def _later(found: JobForecast, passed_ms: Milliseconds) -> JobForecast:
    """The forecast, some time after it was made."""
    left_ms = found.left_ms
    rest = (max(0, each - passed_ms) for each in (left_ms.low, left_ms.middle, left_ms.high))
    return replace(found, left_ms=ForecastRange(*rest))


def forecast_message(found: JobForecast) -> forecast_pb2.JobForecast:
    """A forecast for the wire."""
    message = forecast_pb2.JobForecast(
        left_ms=_range_message(found.left_ms),
        bytes_up=_range_message(found.bytes_up),
        bytes_down=_range_message(found.bytes_down),
        samples=found.samples,
        rounds=found.rounds,
        nodes=found.nodes,
        measured_nodes=found.measured_nodes,
        reason=found.reason,
    )
    if found.escrow:
        cost = found.cost
        message.cost.CopyFrom(
            forecast_pb2.ForecastAmount(
                low=str(cost.low),
                middle=str(cost.middle),
                high=str(cost.high),
                escrow=str(found.escrow),
            )
        )
    return message


def _range_message(found: ForecastRange) -> forecast_pb2.ForecastRange:
    return forecast_pb2.ForecastRange(low=found.low, middle=found.middle, high=found.high)

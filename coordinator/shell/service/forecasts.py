"""Forecasts of jobs that are not created yet, and of those that run."""

import asyncio
import secrets
from collections import OrderedDict

from msgspec.structs import replace

from coordinator.core.hub.evaluator_turns import EvaluatorJob
from coordinator.core.training.job.state import ENDED, Job
from coordinator.core.training.job_forecast.basis import ForecastBasis, ForecastRange, JobForecast
from coordinator.core.training.job_forecast.forecast import forecast_job
from coordinator.core.training.plan.uploads import payload_bits_per_s
from coordinator.shell.driver.job_runtime import JobRuntime
from coordinator.shell.driver.workload_versions import catalogue_version
from coordinator.shell.evaluator.process import Initialise
from coordinator.shell.kinds.training.planning import sizes_of
from coordinator.shell.nodes.fleet_speeds import speed_sources
from coordinator.shell.rate import Rate, RateLimiter
from coordinator.shell.service.calls import Caller
from coordinator.shell.services import Services
from hypergpu.clock import monotonic_ms
from hypergpu.errors import HyperGPUError, Reason
from hypergpu.ids import JobId, NodeId, TokenId
from hypergpu.jobfile.reading import parse_spec_json
from hypergpu.jobfile.rules import covering
from hypergpu.jobfile.spec import JobSpec
from hypergpu.tensors.layout import Layout, LayoutError, TensorSpec, layout_from_json, layout_of
from hypergpu.units import Milliseconds, several
from hypergpu.v1 import forecast_pb2, job_pb2

_ESTIMATES = Rate(burst=10, interval_ms=Milliseconds(2_000))
"""Estimates of one token: each may cost half a second of a processor."""
_KEPT_MS = 5_000
"""A running job's forecast is told so long before it is made again."""
_LAYOUTS_KEPT = 64


class JobForecasts:
    """Makes forecasts, one at a time."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self._rates = RateLimiter(_ESTIMATES)
        self._turn = asyncio.Lock()
        self._layouts: OrderedDict[tuple[object, ...], Layout] = OrderedDict()
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
            layout = await self._layout_for(spec, request.parameters, owner)
            job = Job(
                job_id=JobId(""),
                spec=covering(spec, len(nodes)),
                layout=layout.digest,
                workload_version=catalogue_version(spec.workload),
            )
            basis = self._basis(job, layout, nodes, monotonic_ms())
            found = await self._services.heavy.run(lambda: forecast_job(basis))
        if isinstance(found, str):
            raise HyperGPUError(Reason.NODES_MISSING, found)
        if not busy:
            return found
        verb = "works" if busy == 1 else "work"
        reason = f"{found.reason}; {busy} of them {verb} for other jobs now: it may wait"
        return replace(found, reason=reason)

    async def of_job(self, runtime: JobRuntime) -> JobForecast | None:
        """What a job takes from now on; None where nothing can be said."""
        job, now_ms = runtime.job, monotonic_ms()
        if job.phase in ENDED or runtime.layout is None:
            return None
        made_ms, found = self._kept.get(job.job_id, (Milliseconds(-_KEPT_MS), None))
        if now_ms - made_ms >= _KEPT_MS:
            async with self._turn:
                made_ms, found = self._kept.get(job.job_id, (made_ms, found))
                if now_ms - made_ms >= _KEPT_MS:
                    made_ms, found = monotonic_ms(), await self._forecast(runtime)
                    self._keep(job.job_id, made_ms, found)
        if found is None:
            return None
        return _later(found, Milliseconds(monotonic_ms() - made_ms))

    async def _forecast(self, runtime: JobRuntime) -> JobForecast | None:
        job, now_ms = runtime.job, runtime.now_ms()
        nodes = [node for node, member in job.members.items() if member.can_work]
        newest = replace(job, spec=job.next_spec or job.spec)
        basis = self._basis(newest, runtime.required_layout, nodes, now_ms)
        found = await self._services.heavy.run(lambda: forecast_job(basis, job))
        return None if isinstance(found, str) else found

    def _keep(self, job_id: JobId, made_ms: Milliseconds, found: JobForecast | None) -> None:
        self._kept.pop(job_id, None)
        self._kept[job_id] = (made_ms, found)
        while len(self._kept) > _LAYOUTS_KEPT:
            self._kept.popitem(last=False)

    def _nodes_for(self, spec: JobSpec) -> tuple[list[NodeId], int]:
        """Nodes that a new job would get, and how many of them work for other jobs."""
        offers, unfit = self._services.allocator.offers_for(spec)
        needed = spec.training.nodes
        if len(offers) < needed:
            there = len(self._services.nodes.streams)
            if not there:
                fix = "connect one: hypergpu join"
                raise HyperGPUError(Reason.NODES_MISSING, "no node is connected", fix=fix)
            detail = f"training.nodes is {needed}, and of {several(there, 'connected node')}"
            detail += f" {len(offers)} can train it"
            detail += f"; another one cannot: {unfit}" if unfit else ""
            fix = f"set training.nodes to {max(1, len(offers))} or less, or connect more nodes"
            raise HyperGPUError(Reason.NODES_MISSING, detail, fix=fix)
        free = [offer for offer in offers if offer.job_id is None]
        chosen = free if len(free) >= needed else offers
        chosen = sorted(chosen, key=lambda offer: -offer.health)
        chosen = chosen[: spec.nodes.max or None]
        return [offer.node for offer in chosen], sum(each.job_id is not None for each in chosen)

    def _basis(
        self, job: Job, layout: Layout, nodes: list[NodeId], now_ms: Milliseconds
    ) -> ForecastBasis:
        services, settings = self._services, self._services.settings
        sizes = sizes_of(layout)
        sources = speed_sources(job, services.nodes.streams, nodes)
        return ForecastBasis(
            spec=job.spec,
            readings=services.readings.readings(nodes, now_ms, sources),
            sizes=sizes,
            times=services.driver.command_times.times_for(sizes.model_bytes),
            now_ms=now_ms,
            lost_after_ms=Milliseconds(settings.lost_after_ms),
            line_bits_per_s=payload_bits_per_s(settings.line_mbit_s * 1_000_000),
            paused=services.nodes.pause_reasons(nodes),
        )

    async def _layout_for(self, spec: JobSpec, parameters: int, owner: TokenId) -> Layout:
        """The layout of the job's model, or one of as many parameters."""
        if parameters:
            return self._known_layout_of(spec, parameters) or _layout_of_count(parameters)
        if (known := self._known_layout(spec)) is not None:
            return known
        key = (spec.workload, catalogue_version(spec.workload), tuple(sorted(spec.options.items())))
        if key not in self._layouts:
            self._layouts[key] = await self._made_layout(spec, owner)
            while len(self._layouts) > _LAYOUTS_KEPT:
                self._layouts.popitem(last=False)
        return self._layouts[key]

    def _known_layout_of(self, spec: JobSpec, parameters: int) -> Layout | None:
        """Layout of the newest job of the workload with so many parameters; None: there is none."""
        runtimes = list(self._services.driver.runtimes.values())
        layouts = (
            each.layout for each in runtimes[::-1] if each.job.spec.workload == spec.workload
        )
        return next(
            (each for each in layouts if each and each.parameters_count == parameters), None
        )

    def _known_layout(self, spec: JobSpec) -> Layout | None:
        """Layout of a job of the same workload, options and data; None: there is none."""
        for runtime in self._services.driver.runtimes.values():
            known = runtime.job.spec
            is_alike = (known.workload, known.options) == (spec.workload, spec.options)
            if is_alike and runtime.layout is not None and known.data.path == spec.data.path:
                return runtime.layout
        return None

    async def _made_layout(self, spec: JobSpec, owner: TokenId) -> Layout:
        """Layout of a model that an evaluator makes for it, and that is thrown away."""
        name = f"estimate-{secrets.token_hex(6)}"
        blobs, evaluator = self._services.blobs, self._services.evaluator
        model_path, layout_path = blobs.work_path(f"{name}-initial"), blobs.work_path(name)
        request = Initialise(
            workload=spec.workload,
            options=spec.options,
            seed=spec.training.seed,
            data_dir="",
            is_held_out=spec.data.stays_on_nodes,
            model_path=str(model_path),
            layout_path=str(layout_path),
        )
        job = EvaluatorJob(JobId(name), owner)
        try:
            made = await evaluator.initialise(job, request)
            return layout_from_json(made.layout_json)
        except HyperGPUError as refused:
            if not spec.data.path:
                raise
            raise HyperGPUError(
                Reason.MODEL_MISSING,
                f"the size of its model is known only with its data: {refused.detail}",
                fix="submit it, and look at `hypergpu job show`",
            ) from refused
        except LayoutError as broken:
            raise HyperGPUError(Reason.WORKLOAD_UNKNOWN, f"its layout: {broken}") from broken
        finally:
            evaluator.end_job(job.job_id)
            for path in (model_path, layout_path):
                path.unlink(missing_ok=True)


def _layout_of_count(parameters: int) -> Layout:
    """A layout of so many parameters in one tensor.

    Raises:
        HyperGPUError: SPEC_INVALID, there are too many.
    """
    try:
        return layout_of([TensorSpec("model", (parameters,))])
    except LayoutError as broken:
        raise HyperGPUError(Reason.SPEC_INVALID, f"its model: {broken}") from broken


def _later(found: JobForecast, passed_ms: Milliseconds) -> JobForecast:
    """The forecast, some time after it was made."""
    left = found.left_ms
    rest = (max(0, each - passed_ms) for each in (left.low, left.middle, left.high))
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

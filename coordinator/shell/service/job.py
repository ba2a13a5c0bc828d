"""JobService: what users ask of jobs."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import structlog

from coordinator.core.training.job.events import ParametersChanged
from coordinator.core.work.work_events import JobPaused, JobResumed, JobStopped, StampedEvent
from coordinator.shell import translate
from coordinator.shell.driver.performing import Performing
from coordinator.shell.driver.work_runtime import WorkRuntime
from coordinator.shell.kinds.farm.budget_raise import raised_budget
from coordinator.shell.kinds.farm.runtime import FarmRuntime, farm_of
from coordinator.shell.kinds.farm.views import (
    accepted_results,
    bundle_progress,
    resolve_result,
)
from coordinator.shell.kinds.serving.runtime import served_of
from coordinator.shell.kinds.training.job_runtime import JobRuntime, training_of
from coordinator.shell.kinds.training.preparation import ModelPreparation
from coordinator.shell.kinds.training.waiting_reasons import WaitingReasons
from coordinator.shell.nodes.fleet import Fleet
from coordinator.shell.service.calls import Caller, page_of
from coordinator.shell.service.creation import JobCreation
from coordinator.shell.service.forecasts import JobForecasts, forecast_message
from coordinator.shell.service.job_export import resolve_model
from coordinator.shell.service.job_view import (
    OwnNodes,
    may_see,
    participants,
    require_owner,
    require_visible,
)
from coordinator.shell.service.job_watch import watch_job
from coordinator.shell.service.removal import JobRemoval
from coordinator.shell.service.ring_export import resolve_ring_adapter
from coordinator.shell.service.ring_summary import add_ring_training
from coordinator.shell.service.transfer import UserFiles
from coordinator.shell.store.storage import Storage
from hypergpu.clock import unix_s
from hypergpu.errors import HyperGPUError, Reason
from hypergpu.ids import JobId, TokenId
from hypergpu.jobfile.reading import spec_json, with_parameters
from hypergpu.units import Milliseconds
from hypergpu.v1 import farm_pb2, job_pb2, spec_pb2, work_pb2
from hypergpu.wire.messages import blob_value, model_message
from hypergpu.wire.specs import spec_message, spec_value

log = structlog.get_logger()
_UNFIT_MAX = 50
"""Nodes that do not fit a job, of which each is told with its reason."""

_NOW = Milliseconds(0)  # the driver stamps events as they enter its inbox


@dataclass(kw_only=True)
class JobServicer:
    """One method a call; `coordinator.shell.service.calls` has admitted the caller."""

    performing: Performing
    storage: Storage
    fleet: Fleet
    files: UserFiles
    preparation: ModelPreparation
    creation: JobCreation
    removal: JobRemoval
    forecasts: JobForecasts
    reasons: WaitingReasons

    def __post_init__(self) -> None:
        self._driver = self.performing.driver

    async def create_job(
        self, request: job_pb2.CreateJobRequest, caller: Caller
    ) -> job_pb2.CreateJobResponse:
        if request.HasField("work"):
            job_id = await self.creation.create_packed(request, caller)
            return job_pb2.CreateJobResponse(job_id=job_id)
        source = self._own_training(caller, request.weights_job) if request.weights_job else None
        job_id = await self.creation.create(request, caller, source)
        return job_pb2.CreateJobResponse(job_id=job_id)

    async def estimate_job(
        self, request: job_pb2.EstimateJobRequest, caller: Caller
    ) -> job_pb2.EstimateJobResponse:
        forecast = await self.forecasts.estimate(request, caller)
        return job_pb2.EstimateJobResponse(forecast=forecast_message(forecast))

    async def get_token(
        self, request: job_pb2.GetTokenRequest, caller: Caller
    ) -> job_pb2.GetTokenResponse:
        if caller.token is None:
            raise HyperGPUError(Reason.TOKEN_INVALID, "the call carries no token")
        return job_pb2.GetTokenResponse(token=translate.token_summary(caller.token, unix_s()))

    async def register_spec_key(
        self, request: spec_pb2.RegisterSpecKeyRequest, caller: Caller
    ) -> spec_pb2.RegisterSpecKeyResponse:
        await self.creation.keys.register(request, caller)
        return spec_pb2.RegisterSpecKeyResponse()

    async def list_spec_keys(
        self, request: spec_pb2.ListSpecKeysRequest, caller: Caller
    ) -> spec_pb2.ListSpecKeysResponse:
        return await self.creation.keys.list(caller)

    async def revoke_spec_key(
        self, request: spec_pb2.RevokeSpecKeyRequest, caller: Caller
    ) -> spec_pb2.RevokeSpecKeyResponse:
        return spec_pb2.RevokeSpecKeyResponse(
            jobs=await self.creation.keys.revoke(request.public_key, caller)
        )

    async def get_job(
        self, request: job_pb2.GetJobRequest, caller: Caller
    ) -> job_pb2.GetJobResponse:
        visible_runtime = self._visible(caller, request.job_id)
        if (runtime := training_of(visible_runtime)) is None:
            summary = self._summary(visible_runtime, caller.own_nodes)
            short_answer = job_pb2.GetJobResponse(
                job=summary,
                spec_json="{}",
                takeover=visible_runtime.takeover,
                unfit=self._unfit_nodes(visible_runtime, caller.own_nodes),
            )
            farm = farm_of(visible_runtime)
            if farm is not None and farm.job.spec and caller.may_change(farm.job.owner):
                short_answer.signed_spec.CopyFrom(spec_message(farm.job.spec))
            return short_answer
        job = runtime.job
        answer = job_pb2.GetJobResponse(
            job=self._summary(runtime, caller.own_nodes),
            spec_json=spec_json(job.next_spec or job.spec),
            participants=participants(self.fleet.nodes, runtime.job, caller.own_nodes),
            unfit=self._unfit_nodes(runtime, caller.own_nodes),
            takeover=runtime.takeover,
            notes=job.notes,
        )
        if job.model is not None:
            answer.model.CopyFrom(model_message(job.model.blob, job.model.deltas, job.layout))
        if request.wants_forecast and (forecast := await self.forecasts.of_job(runtime)):
            answer.forecast.CopyFrom(forecast_message(forecast))
        return answer

    def _unfit_nodes(self, runtime: WorkRuntime[Any], own: OwnNodes) -> list[work_pb2.UnfitNode]:
        if self._driver.kinds.of_job(runtime.job).core.has_ended(runtime.job):
            return []
        reasons = self.fleet.allocator.unmet_reasons(runtime).items()
        names = self.fleet.nodes
        return [
            work_pb2.UnfitNode(node_id=node, name=names.name_of(node), reason=reason)
            for node, reason in reasons
            if own is None or node in own
        ][:_UNFIT_MAX]

    async def list_jobs(
        self, request: job_pb2.ListJobsRequest, caller: Caller
    ) -> job_pb2.ListJobsResponse:
        driver, own = self._driver, caller.own_nodes
        unreadable = driver.unreadable.items() if own is None else ()
        resting_jobs = [translate.resting_summary(*each) for each in unreadable]
        runtimes = [
            self._summary(runtime, own)
            for runtime in self._driver.runtimes.values()
            if may_see(runtime.job, own)
        ]
        page, next_page = page_of([*resting_jobs, *runtimes], request.page)
        return job_pb2.ListJobsResponse(jobs=page, next_page=next_page)

    async def pause_job(
        self, request: job_pb2.PauseJobRequest, caller: Caller
    ) -> job_pb2.PauseJobResponse:
        await self._change(caller, request.job_id, JobPaused(at_ms=_NOW))
        return job_pb2.PauseJobResponse()

    async def resume_job(
        self, request: job_pb2.ResumeJobRequest, caller: Caller
    ) -> job_pb2.ResumeJobResponse:
        runtime = self._changeable(caller, request.job_id)
        if (training := training_of(runtime)) is not None and training.is_given_up:
            await self.preparation.load_layout(training)
        await self._change(caller, request.job_id, JobResumed(at_ms=_NOW))
        self.performing.retry_after_resume(runtime)
        return job_pb2.ResumeJobResponse()

    async def stop_job(
        self, request: job_pb2.StopJobRequest, caller: Caller
    ) -> job_pb2.StopJobResponse:
        await self._change(caller, request.job_id, JobStopped(at_ms=_NOW))
        return job_pb2.StopJobResponse()

    async def set_parameters(
        self, request: job_pb2.SetParametersRequest, caller: Caller
    ) -> job_pb2.SetParametersResponse:
        if (farm := farm_of(self._changeable(caller, request.job_id))) is not None:
            await self._raise_budget(farm, request, caller)
            return job_pb2.SetParametersResponse()
        runtime = self._own_training(caller, request.job_id)
        async with runtime.settings_lock:
            before = runtime.job.next_spec or runtime.job.spec
            spec = with_parameters(before, dict(request.parameters))
            change_event = ParametersChanged(at_ms=_NOW, spec=spec)
            await self._change(caller, request.job_id, change_event)
        return job_pb2.SetParametersResponse()

    async def _raise_budget(
        self, farm: FarmRuntime, request: job_pb2.SetParametersRequest, caller: Caller
    ) -> None:
        job, signed_spec = farm.job, None
        if request.HasField("signed_spec"):
            signed_spec = spec_value(request.signed_spec)
        event = raised_budget(job, dict(request.parameters), signed_spec, unix_s())
        if signed_spec is not None:
            keys = self.creation.keys.keys
            await asyncio.to_thread(keys.require_good, job.owner, signed_spec)
        await self._change(caller, request.job_id, event)

    async def remove_job(
        self, request: job_pb2.RemoveJobRequest, caller: Caller
    ) -> job_pb2.RemoveJobResponse:
        job_id = JobId(request.job_id)
        if job_id in self._driver.unreadable:
            require_owner(caller, job_id, TokenId(""))
            freed_bytes = await self.removal.remove_unreadable(job_id)
        else:
            self._changeable(caller, job_id)
            freed_bytes = await self.removal.remove(lambda: self._runtime(job_id))
        return job_pb2.RemoveJobResponse(freed_bytes=freed_bytes)

    async def offer_data(
        self, request: job_pb2.OfferDataRequest, caller: Caller
    ) -> job_pb2.OfferDataResponse:
        return await self.files.offer_data(caller, blob_value(request.blob))

    async def commit_data(
        self, request: job_pb2.CommitDataRequest, caller: Caller
    ) -> job_pb2.CommitDataResponse:
        return await self.files.commit_data(caller, blob_value(request.blob))

    async def resolve_model(
        self, request: job_pb2.ResolveModelRequest, caller: Caller
    ) -> job_pb2.ResolveModelResponse:
        model = served_of(self._changeable(caller, request.job_id))
        if model is not None:
            return await resolve_ring_adapter(self.storage, model.job, request)
        runtime = self._own_training(caller, request.job_id)
        return await resolve_model(self.storage, runtime, request)

    async def list_results(
        self, request: farm_pb2.ListResultsRequest, caller: Caller
    ) -> farm_pb2.ListResultsResponse:
        return accepted_results(self._own_farm(caller, request.job_id), request)

    async def resolve_result(
        self, request: farm_pb2.ResolveResultRequest, caller: Caller
    ) -> farm_pb2.ResolveResultResponse:
        runtime = self._own_farm(caller, request.job_id)
        return await resolve_result(self.storage, runtime, request)

    def _own_farm(self, caller: Caller, job_id: str) -> FarmRuntime:
        """The farm job, if it is the caller's.

        Raises:
            HyperGPUError: As of `_changeable`; REQUEST_INVALID, it is a job of another kind.
        """
        runtime = self._changeable(caller, job_id)
        if (farm := farm_of(runtime)) is None:
            kind = self._driver.kinds.of_job(runtime.job).core.name
            detail = f"{job_id} is a job of kind {kind}, which has no results of bundles"
            raise HyperGPUError(Reason.REQUEST_INVALID, detail)
        return farm

    def watch_job(
        self, request: job_pb2.WatchJobRequest, caller: Caller
    ) -> AsyncIterator[job_pb2.WatchJobResponse]:
        runtime = self._visible(caller, request.job_id)
        return watch_job(self._driver, self.fleet.nodes, runtime, request, caller.own_nodes)

    def _summary(self, found: WorkRuntime[Any], own: OwnNodes) -> job_pb2.JobSummary:
        if (runtime := training_of(found)) is None:
            machine = self._driver.kinds.of_job(found.job).core
            summary = translate.work_summary(machine, found.job, found.now_ms())
            if (farm := farm_of(found)) is not None:
                summary.bundles.CopyFrom(bundle_progress(farm.job))
                summary.name = farm.job.request.name or summary.name
            elif (model := served_of(found)) is not None:
                summary.name = model.job.request.model
                add_ring_training(summary, model.job)
            return summary
        summary = translate.job_summary(runtime.job, runtime.now_ms())
        # What a job waits for names other jobs, of which a node's token is to know nothing.
        if own is None and (waiting_reason := self.reasons.waiting_reason(runtime)):
            summary.reason = waiting_reason
        return summary

    def _runtime(self, job_id: str) -> WorkRuntime[Any]:
        runtime = self._driver.runtimes.get(JobId(job_id))
        if why := self._driver.unreadable.get(JobId(job_id)):
            detail = f"{job_id} was journalled by another version, which can go on with it: {why}"
            fix = "start that version again, or remove the job: hypergpu job rm"
            raise HyperGPUError(Reason.VERSION_MISMATCH, detail, fix=fix)
        if runtime is None:
            raise HyperGPUError(Reason.JOB_UNKNOWN, f"there is no job {job_id[:80]!r}")
        return runtime

    def require_visible(self, caller: Caller, job_id: str) -> None:
        """Refuse a node's token that asks about a job in which none of its nodes had a part.

        Raises:
            HyperGPUError: JOB_UNKNOWN, VERSION_MISMATCH or ROLE_FORBIDDEN.
        """
        if caller.own_nodes is not None:
            self._visible(caller, job_id)

    def _visible(self, caller: Caller, job_id: str) -> WorkRuntime[Any]:
        """The job, if the caller may see it.

        Raises:
            HyperGPUError: JOB_UNKNOWN, VERSION_MISMATCH or ROLE_FORBIDDEN.
        """
        runtime = self._runtime(job_id)
        require_visible(runtime.job, caller.own_nodes)
        return runtime

    def _own_training(self, caller: Caller, job_id: str) -> JobRuntime:
        """The training job, if it is the caller's.

        Raises:
            HyperGPUError: As of `_changeable`; REQUEST_INVALID, it is a job of another kind.
        """
        runtime = self._changeable(caller, job_id)
        if (training := training_of(runtime)) is None:
            kind = self._driver.kinds.of_job(runtime.job).core.name
            raise HyperGPUError(Reason.REQUEST_INVALID, f"{job_id} is a job of kind {kind}")
        return training

    def _changeable(self, caller: Caller, job_id: str) -> WorkRuntime[Any]:
        """The job, if it is the caller's.

        Raises:
            HyperGPUError: JOB_UNKNOWN, VERSION_MISMATCH or ROLE_FORBIDDEN.
        """
        runtime = self._runtime(job_id)
        require_owner(caller, runtime.job.job_id, runtime.job.owner)
        return runtime

    async def _change(self, caller: Caller, job_id: str, event: StampedEvent) -> None:
        self._changeable(caller, job_id)
        if reason := await self._driver.submit(JobId(job_id), event):
            raise HyperGPUError(Reason.JOB_PHASE, reason)

"""JobService: what users ask of jobs."""

import asyncio
import secrets
import shutil
from collections.abc import AsyncIterator

import structlog

from coordinator.core.job.events import (
    Event,
    JobCreated,
    JobPaused,
    JobResumed,
    JobStopped,
    ParametersChanged,
)
from coordinator.core.job.state import ENDED
from coordinator.shell import translate
from coordinator.shell.commands.datasets import (
    laid_out_manifests,
    manifest_digests,
    packed_manifest,
    remove_layout,
)
from coordinator.shell.commands.evaluation import failed_judgement
from coordinator.shell.commands.perform import retry_after_resume
from coordinator.shell.commands.preparation import load_layout
from coordinator.shell.failpoints import failpoint
from coordinator.shell.journal.records import RequestClaim
from coordinator.shell.runtime.job_runtime import JobRuntime
from coordinator.shell.runtime.maintenance import collect
from coordinator.shell.runtime.services import Services
from coordinator.shell.servicers import uploads
from coordinator.shell.servicers.user.export import export_model
from coordinator.shell.servicers.user.watch import participants, watch_job
from coordinator.shell.servicers.wire.handlers import Caller, Requests
from hypergpu.digest import digest_of
from hypergpu.errors import HyperGPUError, Reason
from hypergpu.ids import JobId
from hypergpu.jobfile import covering, parse_spec_json, spec_json, with_parameters
from hypergpu.jobfile.spec import JobSpec
from hypergpu.statements.assignment import BlobRef
from hypergpu.units import Milliseconds, are, several
from hypergpu.v1 import job_pb2, tensor_pb2
from hypergpu.wire.assignment import blob_value, digest_value, model_message

log = structlog.get_logger()

_NOW = Milliseconds(0)  # the driver stamps events as they enter its inbox
_REQUEST_ID_LENGTH_MAX = 128
_KEEP_MANIFEST_S = 60


class JobServicer:
    """One method a call; `coordinator.shell.servicers.wire` has admitted the caller."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self._creating = asyncio.Lock()

    async def create_job(
        self, request: job_pb2.CreateJobRequest, caller: Caller
    ) -> job_pb2.CreateJobResponse:
        if not 0 < len(request.request_id) <= _REQUEST_ID_LENGTH_MAX:
            raise HyperGPUError(Reason.REQUEST_INVALID, "request_id must have 1 to 128 characters")
        spec = parse_spec_json(request.spec_json)
        manifest = request.manifest if request.HasField("manifest") else None
        creating = asyncio.create_task(self._create_in_turn(request.request_id, spec, manifest))
        # A caller who goes away does not leave a job behind that is half created.
        return job_pb2.CreateJobResponse(job_id=await asyncio.shield(creating))

    async def _create_in_turn(
        self, request_id: str, spec: JobSpec, manifest: tensor_pb2.Manifest | None
    ) -> JobId:
        async with self._creating:
            return await self._create(request_id, spec, manifest)

    async def _create(
        self, request_id: str, spec: JobSpec, manifest: tensor_pb2.Manifest | None
    ) -> JobId:
        driver = self._services.driver
        packed = packed_manifest(manifest) if manifest is not None else b""
        fingerprint = digest_of(spec_json(spec).encode() + b"\0" + packed)
        known = await driver.in_writer(self._services.journal.request, request_id)
        if known is not None:
            if known.fingerprint != fingerprint:
                detail = f"request_id {request_id!r} belongs to {known.job_id}, which differs"
                raise HyperGPUError(Reason.REQUEST_INVALID, detail)
            return known.job_id
        spec = covering(spec, self._services.nodes.at_work)
        job_id = JobId(f"job-{secrets.token_hex(6)}")
        files = manifest_digests(manifest) if manifest is not None else frozenset()
        pinned = [*files, *([digest_of(packed)] if manifest is not None else [])]
        self._services.pins.add(pinned)
        try:
            blob = await self._store_manifest(manifest, packed) if manifest is not None else None
            event = JobCreated(
                at_ms=_NOW,
                job_id=job_id,
                spec=spec,
                manifest=blob,
                terms=self._services.job_terms.terms(job_id, spec.pay),
                funding=self._services.job_terms.funding(spec.pay),
            )
            await driver.submit(job_id, event, RequestClaim(request_id, job_id, fingerprint))
            driver.runtimes[job_id].entries_of_manifest = files
        finally:
            self._services.pins.drop(pinned)
        log.info("a job was created", job_id=job_id, workload=spec.workload)
        return job_id

    async def _store_manifest(self, manifest: tensor_pb2.Manifest, packed: bytes) -> BlobRef:
        """Store a manifest whose files have all been uploaded, and are pinned."""
        blobs = self._services.blobs

        def missing() -> list[str]:
            return [
                entry.path
                for entry in manifest.entries
                if blobs.size(digest_value(entry.blob.digest)) != entry.blob.size_bytes
            ]

        async with self._services.pins.collecting:
            absent = await asyncio.to_thread(missing)
        if absent:
            wanted = several(len(manifest.entries), "file")
            detail = f"{len(absent)} of {wanted} {are(len(absent))} missing, such as {absent[0]}"
            raise HyperGPUError(Reason.MANIFEST_INVALID, detail)
        blob = await asyncio.to_thread(blobs.put, packed, keep_s=_KEEP_MANIFEST_S)
        failpoint("create.stored")
        return blob

    async def get_job(
        self, request: job_pb2.GetJobRequest, caller: Caller
    ) -> job_pb2.GetJobResponse:
        runtime = self._runtime(request.job_id)
        job = runtime.job
        answer = job_pb2.GetJobResponse(
            job=self._summary(runtime),
            spec_json=spec_json(job.next_spec or job.spec),
            participants=participants(self._services.nodes, runtime.job),
        )
        if job.model is not None:
            answer.model.CopyFrom(model_message(job.model.blob, job.model.deltas, job.layout))
        return answer

    async def list_jobs(
        self, request: job_pb2.ListJobsRequest, caller: Caller
    ) -> job_pb2.ListJobsResponse:
        driver = self._services.driver
        resting = [translate.resting_summary(*each) for each in driver.unreadable.items()]
        runtimes = [self._summary(runtime) for runtime in driver.runtimes.values()]
        return job_pb2.ListJobsResponse(jobs=[*resting, *runtimes])

    async def pause_job(
        self, request: job_pb2.PauseJobRequest, caller: Caller
    ) -> job_pb2.PauseJobResponse:
        await self._change(request.job_id, JobPaused(at_ms=_NOW))
        return job_pb2.PauseJobResponse()

    async def resume_job(
        self, request: job_pb2.ResumeJobRequest, caller: Caller
    ) -> job_pb2.ResumeJobResponse:
        runtime = self._runtime(request.job_id)
        if runtime.is_given_up:
            await load_layout(self._services, runtime)
        await self._change(request.job_id, JobResumed(at_ms=_NOW))
        retry_after_resume(self._services, runtime)
        return job_pb2.ResumeJobResponse()

    async def stop_job(
        self, request: job_pb2.StopJobRequest, caller: Caller
    ) -> job_pb2.StopJobResponse:
        await self._change(request.job_id, JobStopped(at_ms=_NOW))
        return job_pb2.StopJobResponse()

    async def set_parameters(
        self, request: job_pb2.SetParametersRequest, caller: Caller
    ) -> job_pb2.SetParametersResponse:
        runtime = self._runtime(request.job_id)
        async with runtime.settings_lock:
            before = runtime.job.next_spec or runtime.job.spec
            spec = with_parameters(before, dict(request.parameters))
            await self._change(request.job_id, ParametersChanged(at_ms=_NOW, spec=spec))
        return job_pb2.SetParametersResponse()

    async def remove_job(
        self, request: job_pb2.RemoveJobRequest, caller: Caller
    ) -> job_pb2.RemoveJobResponse:
        job_id = JobId(request.job_id)
        driver = self._services.driver
        if job_id in driver.unreadable:
            del driver.unreadable[job_id]
        else:
            await self._measure_ended(self._runtime(job_id))
            self._close(self._runtime(job_id))
        await driver.in_writer(self._services.journal.remove_job, job_id)
        await asyncio.to_thread(self._delete_files, job_id)
        freed_bytes = await collect(self._services)
        log.info("a job was removed", job_id=job_id, freed_bytes=freed_bytes)
        return job_pb2.RemoveJobResponse(freed_bytes=freed_bytes)

    async def _measure_ended(self, runtime: JobRuntime) -> None:
        """Have everything of an ended job measured and receipted before its rows go."""
        job = runtime.job
        if job.phase not in ENDED:
            detail = f"{job.job_id} is {job.phase.value}: stop it first (hypergpu job stop)"
            raise HyperGPUError(Reason.JOB_PHASE, detail)
        refused = ""
        for waiting in job.unmeasured:
            if not waiting.is_ready:
                given_up = failed_judgement(waiting.number, "the job is removed")
                # The judge may answer first: then this is refused, and nothing is left to be done.
                refused = await self._services.driver.submit(job.job_id, given_up)
        if left := runtime.job.unmeasured:
            unmeasured = several(len(left), "round")
            detail = f"the quality of {unmeasured} of {job.job_id} is still to come: {refused}"
            raise HyperGPUError(Reason.JOB_PHASE, detail, fix="remove it again later")
        if self._services.job_terms.payments is not None:
            await self._services.job_terms.payments.catch_up(job.job_id)

    def _close(self, runtime: JobRuntime) -> None:
        del self._services.driver.runtimes[runtime.job.job_id]
        runtime.close()
        runtime.wake()

    def _delete_files(self, job_id: JobId) -> None:
        shutil.rmtree(self._services.job_dir(job_id), ignore_errors=True)
        if self._services.driver.unreadable:
            return  # Nobody knows whose data those need.
        # Listed before the jobs are asked: a folder that a new job lays out is not in the list.
        found = laid_out_manifests(self._services.datasets_dir)
        manifests = [
            runtime.job.manifest for runtime in list(self._services.driver.runtimes.values())
        ]
        needed = {manifest.digest for manifest in manifests if manifest is not None}
        for digest in found:
            if digest not in needed:
                remove_layout(self._services.datasets_dir, digest)

    async def upload_data(self, requests: Requests, caller: Caller) -> job_pb2.UploadDataResponse:
        return await uploads.receive_data(self._services, requests)

    async def query_data(
        self, request: job_pb2.QueryDataRequest, caller: Caller
    ) -> job_pb2.QueryDataResponse:
        blob = blob_value(request.blob)
        offset = await asyncio.to_thread(uploads.stored_bytes, self._services, blob)
        return job_pb2.QueryDataResponse(committed_offset=offset)

    def export_model(
        self, request: job_pb2.ExportModelRequest, caller: Caller
    ) -> AsyncIterator[job_pb2.ExportModelResponse | bytes]:
        return export_model(self._services, self._runtime(request.job_id), request)

    def watch_job(
        self, request: job_pb2.WatchJobRequest, caller: Caller
    ) -> AsyncIterator[job_pb2.WatchJobResponse]:
        return watch_job(self._services, self._runtime(request.job_id), request.from_sequence)

    def _summary(self, runtime: JobRuntime) -> job_pb2.JobSummary:
        return translate.job_summary(runtime.job, runtime.now_ms())

    def _runtime(self, job_id: str) -> JobRuntime:
        runtime = self._services.driver.runtimes.get(JobId(job_id))
        if why := self._services.driver.unreadable.get(JobId(job_id)):
            detail = f"{job_id} was journalled by another version, which can go on with it: {why}"
            fix = "start that version again, or remove the job: hypergpu job rm"
            raise HyperGPUError(Reason.VERSION_MISMATCH, detail, fix=fix)
        if runtime is None:
            raise HyperGPUError(Reason.JOB_UNKNOWN, f"there is no job {job_id[:80]!r}")
        return runtime

    async def _change(self, job_id: str, event: Event) -> None:
        self._runtime(job_id)
        if reason := await self._services.driver.submit(JobId(job_id), event):
            raise HyperGPUError(Reason.JOB_PHASE, reason)

"""Creation of jobs: once for each request id, with data and weights that cannot be collected
meanwhile.
"""

import asyncio
import secrets
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, NamedTuple

import structlog

from coordinator.core.training.job.events import JobCreated
from coordinator.core.training.job.state import InitialWeights
from coordinator.core.training.trust.own_samples import USE_LEAST
from coordinator.core.work.kind import PackedForms
from coordinator.core.work.work_events import StampedEvent
from coordinator.shell.driver.performing import Performing
from coordinator.shell.failpoints import failpoint
from coordinator.shell.kinds.performers.packed_work import PackedWorkPerformer
from coordinator.shell.kinds.training.demand import new_job_demand
from coordinator.shell.kinds.training.job_runtime import JobRuntime
from coordinator.shell.kinds.training.weighing import judges_own_samples
from coordinator.shell.nodes.allocator import NodeAllocator
from coordinator.shell.service.calls import Caller
from coordinator.shell.service.job_terms import NewJobTerms
from coordinator.shell.service.job_view import require_owner
from coordinator.shell.service.own_files import OwnFiles
from coordinator.shell.service.spec_keys import SpecKeyCalls
from coordinator.shell.store.blobs.manifests import (
    manifest_digests,
    packed_manifest,
    stored_manifest,
)
from coordinator.shell.store.journal.records import RequestClaim
from coordinator.shell.store.storage import Storage
from hypergpu.blobs import BlobRef
from hypergpu.clock import unix_s
from hypergpu.digests import digest_of
from hypergpu.errors import HyperGPUError, Reason
from hypergpu.ids import Digest, JobId, TokenId
from hypergpu.jobfile.reading import parse_spec_json, spec_json
from hypergpu.jobfile.rules import covering
from hypergpu.jobfile.spec import JobSpec
from hypergpu.signed_spec import SignedSpec
from hypergpu.units import Milliseconds, are, several
from hypergpu.v1 import job_pb2, tensor_pb2
from hypergpu.wire.messages import blob_value, digest_value
from hypergpu.wire.specs import spec_value
from hypergpu.wire.work import work_value
from hypergpu.workloads.installed import PackageWatch
from hypergpu.workloads.registry import read_entries_again

log = structlog.get_logger()

_NOW = Milliseconds(0)
"""Stamped by the driver."""
_KEEP_MANIFEST_S = 60
_REQUEST_ID_LENGTH_MAX = 128
_JOBS_MAX = 100
"""Jobs of one token that have not ended."""


class _WantedJob(NamedTuple):
    """A job that a caller wants."""

    request_id: str
    owner: TokenId
    spec: JobSpec
    manifest: tensor_pb2.Manifest | None
    packed: bytes
    """The manifest's canonical bytes; none where there is no manifest."""
    weights: InitialWeights | None
    foreign: frozenset[Digest]
    """Files that it names and that its caller has not shown to have."""
    source: str
    """Where the weights are from: a job's id or a file's digest. A job's newest model may be
    another one when its request is sent again.
    """

    @property
    def fingerprint(self) -> Digest:
        """What two requests of one job have in common."""
        identity = f"{self.owner}\0{spec_json(self.spec)}\0".encode()
        begins_with = f"{self.source}\0".encode() if self.source else b""
        return digest_of(identity + begins_with + self.packed)


class JobCreation:
    """Creates jobs one after the other."""

    def __init__(
        self,
        performing: Performing,
        storage: Storage,
        allocator: NodeAllocator,
        job_terms: NewJobTerms,
        own_files: OwnFiles,
        keys: SpecKeyCalls,
    ) -> None:
        self._performing = performing
        self._driver = driver = performing.driver
        self._jobs = driver.runtimes_of(JobRuntime)
        self._storage = storage
        self._allocator = allocator
        self._job_terms = job_terms
        self._own_files = own_files
        self.keys = keys
        self._creating = asyncio.Lock()
        self._packages = PackageWatch()

    async def create(
        self, request: job_pb2.CreateJobRequest, caller: Caller, source: JobRuntime | None
    ) -> JobId:
        """Create the job of a request, unless it was created before.

        Args:
            request: Whatever the caller sent.
            caller: The job's owner.
            source: Job whose newest model the new one begins with; None: the request names none.

        Raises:
            HyperGPUError: The request is malformed, data or weights are missing, the caller has
                too many jobs, or the ledger refuses it.
        """
        _check_request_id(request.request_id)
        if self._packages.look():
            read_entries_again()
        spec = parse_spec_json(request.spec_json)
        manifest = request.manifest if request.HasField("manifest") else None
        if manifest is None and source is not None:
            manifest = await self._manifest_of(source, spec, caller)
        weights = _weights(request, source)
        job_request = _WantedJob(
            request_id=request.request_id,
            owner=_owner(caller),
            spec=spec,
            manifest=manifest,
            packed=packed_manifest(manifest) if manifest is not None else b"",
            weights=weights,
            foreign=self._own_files.foreign(caller, _named_files(request)),
            source=request.weights_job or (weights.blob.digest if weights else ""),
        )
        return await self._create_once(
            job_request.request_id, job_request.fingerprint, lambda: self._create(job_request)
        )

    async def create_packed(self, request: job_pb2.CreateJobRequest, caller: Caller) -> JobId:
        """Create the job of packed work that a request asks for, unless it was created before.

        Raises:
            HyperGPUError: The request is malformed or of a kind that this coordinator has not, or
                the caller has too many jobs.
        """
        _check_request_id(request.request_id)
        work, owner = work_value(request.work), _owner(caller)
        kind = self._driver.kinds.by_name(work.kind)
        if kind is None or kind.core.packed is None:
            detail = f"this coordinator has no packed work of kind {work.kind!r}"
            fix = "name a kind that it has, or upgrade the coordinator"
            raise HyperGPUError(Reason.REQUEST_INVALID, detail, fix=fix)
        job_id = JobId(f"job-{secrets.token_hex(6)}")
        forms = kind.core.packed
        event = self._with_terms(job_id, forms, forms.creation_event(job_id, owner, work))
        if request.HasField("signed_spec"):
            event = await self._with_spec(forms, event, owner, spec_value(request.signed_spec))
        fingerprint = digest_of(f"{owner}\0{work.kind}\0".encode() + work.body)

        performer = self._performing.performer_named(work.kind)

        async def create() -> JobId:
            self._refuse_too_many(owner)
            claim = RequestClaim(request.request_id, job_id, fingerprint)
            foreign = partial(self._own_files.foreign, caller)
            if not isinstance(performer, PackedWorkPerformer):
                raise TypeError(f"work of kind {work.kind} is not performed packed")
            async with performer.admit(event, foreign) as complete_event:
                await self._driver.submit(job_id, complete_event, claim)
            log.info("a job was created", job_id=job_id, kind=work.kind)
            return job_id

        return await self._create_once(request.request_id, fingerprint, create)

    def _with_terms(self, job_id: JobId, forms: PackedForms, event: StampedEvent) -> StampedEvent:
        """The event with what its job's results are signed and paid under, if they are."""
        receipts = forms.receipts
        if receipts is None:
            return event
        pay = receipts.pay(event)
        terms = self._job_terms.terms(job_id, pay, receipts.unit(event))
        return receipts.with_terms(event, terms, self._job_terms.funding(pay))

    async def _with_spec(
        self, forms: PackedForms, event: StampedEvent, owner: TokenId, signed_spec: SignedSpec
    ) -> StampedEvent:
        """The event with what its user signed, by a good key of the token."""
        if forms.with_spec is None:
            detail = "work of this kind is not signed by its user"
            raise HyperGPUError(Reason.REQUEST_INVALID, detail, fix="leave signed_spec out")
        event = forms.with_spec(event, signed_spec, unix_s())
        await asyncio.to_thread(self.keys.keys.require_good, owner, signed_spec)
        return event

    async def _manifest_of(
        self, source: JobRuntime, spec: JobSpec, caller: Caller
    ) -> tensor_pb2.Manifest | None:
        """The source's data, where the new job names the same; only its owner may use them."""
        manifest, same = source.job.manifest, source.job.spec.data.path == spec.data.path
        if manifest is None or not (spec.data.path and same):
            return None
        require_owner(caller, source.job.job_id, source.job.owner)
        return await asyncio.to_thread(stored_manifest, self._storage.blobs, manifest)

    async def _create_once(
        self, request_id: str, fingerprint: Digest, create: Callable[[], Coroutine[Any, Any, JobId]]
    ) -> JobId:
        async def create_in_turn() -> JobId:
            async with self._creating:
                earlier_request = await self._driver.in_writer(
                    self._driver.journal.request, request_id
                )
                if earlier_request is None:
                    return await create()
                if earlier_request.fingerprint != fingerprint:
                    detail = f"request_id {request_id!r} belongs to {earlier_request.job_id}"
                    raise HyperGPUError(Reason.REQUEST_INVALID, f"{detail}, which differs")
                return earlier_request.job_id

        # A caller who goes away does not leave a job behind that is half created.
        return await asyncio.shield(asyncio.create_task(create_in_turn()))

    async def _create(self, wanted: _WantedJob) -> JobId:
        self._refuse_too_many(wanted.owner)
        _refuse_foreign(wanted.foreign)
        spec = covering(wanted.spec, self._allocator.fitting_nodes(new_job_demand(wanted.spec)))
        job_id = JobId(f"job-{secrets.token_hex(6)}")
        files = manifest_digests(wanted.manifest) if wanted.manifest is not None else frozenset()
        pinned_digests = [*files, *_own_blobs(wanted)]
        self._storage.pins.add(pinned_digests)
        try:
            await self._require_weights(wanted.weights)
            event = JobCreated(
                at_ms=_NOW,
                job_id=job_id,
                owner=wanted.owner,
                spec=spec,
                manifest=await self._store_manifest(wanted),
                weights=wanted.weights,
                terms=self._job_terms.terms(job_id, spec.pay),
                funding=self._job_terms.funding(spec.pay),
                judges_own_samples=judges_own_samples(spec),
                tries_updates=judges_own_samples(spec),
                counts_looks=judges_own_samples(spec),
                use_least=USE_LEAST if judges_own_samples(spec) else 0,
            )
            claim = RequestClaim(wanted.request_id, job_id, wanted.fingerprint)
            await self._driver.submit(job_id, event, claim)
            self._jobs[job_id].entries_of_manifest = files
        finally:
            self._storage.pins.drop(pinned_digests)
        log.info("a job was created", job_id=job_id, workload=spec.workload)
        return job_id

    def _refuse_too_many(self, owner: TokenId) -> None:
        jobs = [runtime.job for runtime in self._driver.runtimes.values()]
        kinds = self._driver.kinds
        under_way = sum(
            job.owner == owner and not kinds.of_job(job).core.has_ended(job) for job in jobs
        )
        if under_way >= _JOBS_MAX:
            detail = f"{under_way} jobs of token {owner} have not ended, which is the most"
            fix = "stop one: hypergpu job stop JOB"
            raise HyperGPUError(Reason.LIMIT_REACHED, detail, fix=fix)

    async def _require_weights(self, weights: InitialWeights | None) -> None:
        """Require that the weights, which are pinned, are there."""
        if weights is None:
            return
        async with self._storage.pins.collecting:
            size = await asyncio.to_thread(self._storage.blobs.size, weights.blob.digest)
        if size != weights.blob.size_bytes:
            detail = f"the initial weights {weights.blob.digest[:16]}... are not there"
            raise HyperGPUError(Reason.BLOB_UNKNOWN, detail, fix="send them again")

    async def _store_manifest(self, wanted: _WantedJob) -> BlobRef | None:
        """Store a manifest whose files have all been uploaded, and are pinned."""
        manifest, blobs = wanted.manifest, self._storage.blobs
        if manifest is None:
            return None

        def missing() -> list[str]:
            return [
                entry.path
                for entry in manifest.entries
                if blobs.size(digest_value(entry.blob.digest)) != entry.blob.size_bytes
            ]

        async with self._storage.pins.collecting:
            absent = await asyncio.to_thread(missing)
        if absent:
            files = several(len(manifest.entries), "file")
            detail = f"{len(absent)} of {files} {are(len(absent))} missing, such as {absent[0]}"
            raise HyperGPUError(Reason.MANIFEST_INVALID, detail)
        blob = await asyncio.to_thread(blobs.put, wanted.packed, keep_s=_KEEP_MANIFEST_S)
        failpoint("create.stored")
        return blob


def _check_request_id(request_id: str) -> None:
    if not 0 < len(request_id) <= _REQUEST_ID_LENGTH_MAX:
        raise HyperGPUError(Reason.REQUEST_INVALID, "request_id must have 1 to 128 characters")


def _owner(caller: Caller) -> TokenId:
    return caller.token.token_id if caller.token else TokenId("")


def _named_files(request: job_pb2.CreateJobRequest) -> frozenset[Digest]:
    """The files that a request names by their digests; an empty one is everybody's."""
    named_blobs = [entry.blob for entry in request.manifest.entries if entry.blob.size_bytes]
    if request.HasField("weights_file"):
        named_blobs.append(request.weights_file)
    return frozenset(digest_value(blob.digest) for blob in named_blobs)


def _refuse_foreign(foreign: frozenset[Digest]) -> None:
    if foreign:
        detail = f"{several(len(foreign), 'file')} {are(len(foreign))} not this token's"
        fix = "submit it again: whoever names a file has to have sent it since the last restart"
        raise HyperGPUError(Reason.BLOB_UNKNOWN, detail, fix=fix)


def _weights(request: job_pb2.CreateJobRequest, source: JobRuntime | None) -> InitialWeights | None:
    if request.HasField("weights_file"):
        return InitialWeights(blob_value(request.weights_file))
    if source is None:
        return None
    if source.job.model is None:
        detail = f"{source.job.job_id} has no model to begin with"
        raise HyperGPUError(Reason.MODEL_MISSING, detail)
    return InitialWeights(source.job.model.blob, source.job.layout)


def _own_blobs(wanted: _WantedJob) -> list[Digest]:
    """Digests of the manifest and the weights."""
    manifest = [digest_of(wanted.packed)] if wanted.manifest is not None else []
    return [*manifest, *([wanted.weights.blob.digest] if wanted.weights is not None else [])]

"""Performs what farm jobs command: bundles go out with their chunks, and results are compared."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial

from msgspec.structs import replace

from coordinator.core.farm.bundle_leases import assign_work, result_bytes_most
from coordinator.core.farm.events import BundleReturned, MapCreated, ResultsCompared
from coordinator.core.farm.part_results import CompareResults
from coordinator.core.farm.state import FarmJob, LeasedBundle, OpenBundle, ReturnedResult
from coordinator.core.work.work_commands import AssignWork
from coordinator.core.work.work_events import StampedEvent
from coordinator.shell.kinds.farm.admission import JobAdmission, stored_items
from coordinator.shell.kinds.farm.comparison import (
    ComparedResult,
    ResultPart,
    are_alike,
    are_parts_alike,
)
from coordinator.shell.kinds.farm.judging import are_judged_alike, are_upheld, claims_in
from coordinator.shell.kinds.farm.result_checks import check_content
from coordinator.shell.kinds.farm.runtime import FarmRuntime, InputChunks
from coordinator.shell.kinds.performers.packed_work import (
    ForeignBlobs,
    PackedCommand,
    PackedWorkPerformer,
)
from coordinator.shell.kinds.performers.resources import WorkResources
from coordinator.shell.store.journal.records import Entry
from hypergpu.assignment import PackedAssignment
from hypergpu.blobs import BlobRef
from hypergpu.errors import HyperGPUError, Reason
from hypergpu.farm.bundles import Bundle
from hypergpu.farm.map_request import ComparisonRule
from hypergpu.ids import Digest, NodeId
from hypergpu.ledger_terms import separator_of
from hypergpu.packed_work import CONTENT_BYTES_MOST, WorkAmount, pack_work, unpack_work
from hypergpu.result_statements import result_contribution, work_digest
from hypergpu.statements import SignedContribution, is_signed_by
from hypergpu.units import Bytes, Milliseconds

_ROWS_AT_ONCE = 10_000
COMPARE, JUDGE = "CompareResults", "AssignClaims"


class FarmPerformer(PackedWorkPerformer):
    """Carries out what farm jobs have commanded."""

    def __init__(self, resources: WorkResources) -> None:
        super().__init__(resources)
        self._storage = resources.storage
        self._heavy = resources.heavy
        self._admission = JobAdmission(resources.storage)

    @asynccontextmanager
    async def admit(self, event: MapCreated, foreign: ForeignBlobs) -> AsyncIterator[StampedEvent]:
        """See `PackedWorkPerformer.admit`."""
        async with self._admission.admit(event, foreign) as complete_event:
            yield complete_event
            runtime = self._driver.runtimes_of(FarmRuntime).get(event.job_id)
            if runtime is not None:
                self._chunks(runtime)

    def perform(self, runtime: FarmRuntime, command: PackedCommand | CompareResults) -> None:
        """Start a command and return at once."""
        if isinstance(command, CompareResults):
            work = self._compare(runtime, command)
            self._performing.start(runtime, (COMPARE, command.lease), work)
        elif isinstance(command, AssignWork) and self._is_judgement(runtime, command):
            lease = command.assignment.lease.number
            self._performing.start(runtime, (JUDGE, lease), self._assign_claims(runtime, command))
        elif isinstance(command, AssignWork):
            super().perform(runtime, self._with_chunks(runtime, command))
        else:
            super().perform(runtime, command)

    def _is_judgement(self, runtime: FarmRuntime, command: AssignWork) -> bool:
        """Whether a node is to judge what another one gave for the items."""
        number = command.assignment.lease.number
        leased_bundle = runtime.job.lease_numbered(command.node, number)
        is_part = leased_bundle is not None and leased_bundle.is_part
        return is_part and runtime.job.request.comparison.rule is ComparisonRule.JUDGED

    async def _assign_claims(self, runtime: FarmRuntime, command: AssignWork) -> None:
        """Store the claims that a node is to judge, and give them to it."""
        job, number = runtime.job, command.assignment.lease.number
        open_bundle = job.bundles.get(command.assignment.lease.round)
        if open_bundle is None or not open_bundle.results:
            return
        results = self._part_result(open_bundle, open_bundle.results[0])
        claims = await self._heavy.run(lambda: self._storage.blobs.put(claims_in(results)))
        if runtime.job.lease_numbered(command.node, number) is not None:
            runtime.note_claims(number, claims)
            super().perform(runtime, self._with_chunks(runtime, command))

    def _with_chunks(self, runtime: FarmRuntime, command: AssignWork) -> AssignWork:
        """The command with the chunks that hold the bundle's items."""
        work = command.assignment.work
        bundle = unpack_work(work, work.kind, Bundle)
        chunks = self._chunks(runtime)
        bundle = replace(
            bundle,
            encoding=chunks.manifest.encoding,
            chunks=chunks.covering(bundle.start, bundle.items),
            claims=runtime.claims.get(command.assignment.lease.number),
        )
        assignment = replace(
            command.assignment,
            work=pack_work(work.kind, bundle),
            inputs=bundle.inputs,
            content_bytes_most=CONTENT_BYTES_MOST,
        )
        runtime.note_assignment(assignment)
        return replace(command, assignment=assignment)

    def _chunks(self, runtime: FarmRuntime) -> InputChunks:
        if runtime.chunks is None:
            # Its creation is a moment ago.
            runtime.chunks = self._admission.chunks_of(runtime.job.job_id)
        if runtime.chunks is None:
            detail = f"{runtime.job.job_id} is being taken up again"
            raise HyperGPUError(Reason.NOT_READY, detail)
        return runtime.chunks

    async def take_up(self, runtime: FarmRuntime) -> None:
        """Read the manifest and the rows of results, then go on as every packed job."""
        manifest = await asyncio.to_thread(
            stored_items, self._storage, runtime.job.request.manifest
        )
        runtime.chunks = InputChunks(manifest)
        await self._read_rows(runtime)
        await super().take_up(runtime)

    async def _read_rows(self, runtime: FarmRuntime) -> None:
        """Read the rows that were there when this process began."""
        end = runtime.next_sequence
        rows: list[Entry] = []
        while len(rows) < end:
            limit = min(_ROWS_AT_ONCE, end - len(rows))
            read = partial(self._driver.journal.read, runtime.job.job_id, len(rows), limit=limit)
            page = (await asyncio.to_thread(read)).entries
            if not page:
                break
            rows += page
        runtime.begin_rows(rows)

    def inputs(self, runtime: FarmRuntime, node: NodeId) -> frozenset[Digest]:
        """See `PackedWorkPerformer.inputs`: the blobs of the bundles that the node has."""
        job, request = runtime.job, runtime.job.request
        runs = [job.leased_run(each) for each in job.leases_of(node)]
        if not runs:
            return frozenset()
        chunks = [
            chunk for run in runs for chunk in self._chunks(runtime).covering(run.start, run.items)
        ]
        claims = (runtime.claims.get(each.lease) for each in job.leases_of(node))
        files = [*request.files.values(), *(each for each in claims if each is not None)]
        if runtime.job.spec is not None:
            files.append(request.manifest)
        return frozenset(blob.digest for blob in (*(each.blob for each in chunks), *files))

    def result_bytes_most(self, runtime: FarmRuntime, node: NodeId) -> Bytes:
        """See `PackedWorkPerformer.result_bytes_most`."""
        job = runtime.job
        sizes = [result_bytes_most(job, job.leased_run(each).items) for each in job.leases_of(node)]
        return max(sizes, default=Bytes(0))

    async def check_result(
        self, runtime: FarmRuntime, event: BundleReturned, blob: BlobRef | None, content: bytes
    ) -> None:
        """See `PackedWorkPerformer.check_result`. What came beside the result is so small that a
        thread would cost more than the check.
        """
        if blob != event.result.blob:
            detail = "the result names another blob than the one that was sent"
            raise HyperGPUError(Reason.REQUEST_INVALID, detail)
        leased_bundle = runtime.job.lease_numbered(event.node, event.lease)
        is_part = leased_bundle is not None and leased_bundle.is_part
        check = partial(check_content, runtime.job.request, event.result, is_part=is_part)
        if content:
            check(content)
        else:
            await self._heavy.run(lambda: check(self._content(event.result.blob)))

    def with_claim(
        self, runtime: FarmRuntime, event: BundleReturned, signature: bytes
    ) -> BundleReturned:
        """See `PackedWorkPerformer.with_claim`: without a signature no money is due."""
        job, result = runtime.job, event.result
        leased_bundle = job.lease_numbered(event.node, event.lease)
        if leased_bundle is None:
            return event  # It is void, as the machine says.
        assignment = runtime.assignments.get(event.lease)
        if assignment is None:
            assignment = self._assignment_again(runtime, event.node, leased_bundle)
        if assignment.terms is None or not result.units:
            return event
        if not signature:
            _refuse_unsigned(job)
            return event
        amount = WorkAmount(result.units, result.compute_ms)
        digest = work_digest(assignment.work)
        statement = result_contribution(
            assignment.terms, assignment.lease, event.node, digest, result.blob, amount
        )
        separator = separator_of(assignment.terms.domain)
        if not is_signed_by(event.node, separator, statement, signature):
            detail = "the signature does not cover this result of this work: sign what was assigned"
            raise HyperGPUError(Reason.SIGNATURE_INVALID, detail)
        return replace(event, claim=SignedContribution(statement, signature))

    def _assignment_again(
        self, runtime: FarmRuntime, node: NodeId, leased_bundle: LeasedBundle
    ) -> PackedAssignment:
        """What a node was given by a process before this one, or by this one a while ago."""
        command = assign_work(runtime.job, node, leased_bundle)
        if self._is_judgement(runtime, command) and leased_bundle.lease not in runtime.claims:
            detail = f"{runtime.job.job_id} is being taken up again"
            raise HyperGPUError(Reason.NOT_READY, detail)
        return self._with_chunks(runtime, command).assignment

    def _content(self, blob: BlobRef) -> bytes:
        """All bytes of a stored blob. Blocks."""
        return self._storage.blobs.path(blob.digest).read_bytes()

    async def _compare(self, runtime: FarmRuntime, command: CompareResults) -> None:
        """Compare the newest result of a bundle with the earlier ones, and report it."""
        open_bundle = runtime.job.bundles.get(command.bundle)
        if open_bundle is None or open_bundle.comparing != command.lease:
            return
        if open_bundle.part is not None:
            await self._compare_part(runtime, command, open_bundle)
            return
        *earlier, newest = open_bundle.results
        like_leases = [
            each.lease
            for each in earlier
            if await self._heavy.run(partial(self._is_agreement, runtime, each, newest))
        ]
        await self._report(runtime, command, like_leases)

    async def _compare_part(
        self, runtime: FarmRuntime, command: CompareResults, open_bundle: OpenBundle
    ) -> None:
        """Compare a vote on a part with the bundle's own result and with earlier votes."""
        results = [*open_bundle.results, *(vote.result for vote in open_bundle.votes)]
        newest = next(each for each in results if each.lease == command.lease)
        like_leases = [
            each.lease
            for each in results[: results.index(newest)]
            if await self._heavy.run(partial(self._is_vote_for, runtime, open_bundle, each, newest))
        ]
        await self._report(runtime, command, like_leases)

    async def _report(
        self, runtime: FarmRuntime, command: CompareResults, like_leases: Sequence[int]
    ) -> None:
        event = ResultsCompared(
            at_ms=Milliseconds(0),
            bundle=command.bundle,
            lease=command.lease,
            agreeing=tuple(like_leases),
        )
        await self._driver.report(runtime.job.job_id, event)

    def _is_vote_for(
        self,
        runtime: FarmRuntime,
        open_bundle: OpenBundle,
        one: ReturnedResult,
        newest: ReturnedResult,
    ) -> bool:
        """Whether the newest vote agrees with another result of the part. Blocks."""
        request = runtime.job.request
        first, second = (self._part_result(open_bundle, each) for each in (one, newest))
        if request.comparison.rule is ComparisonRule.JUDGED:
            is_own = one in open_bundle.results
            are_alike_judged = are_upheld if is_own else are_judged_alike
            return are_alike_judged(first.lines, second.lines)
        return are_parts_alike(first, second, request.result, request.comparison)

    def _part_result(self, open_bundle: OpenBundle, result: ReturnedResult) -> ComparedResult:
        run, part = open_bundle.run, open_bundle.part or open_bundle.run
        is_own = result in open_bundle.results
        first, result_items = (part.start - run.start, run.items) if is_own else (0, part.items)
        place = ResultPart(first, part.items, result_items)
        return ComparedResult(self._content(result.result.blob), place)

    def _is_agreement(
        self, runtime: FarmRuntime, one: ReturnedResult, other: ReturnedResult
    ) -> bool:
        request, items = runtime.job.request, one.result.items + one.result.failures
        contents = self._content(one.result.blob), self._content(other.result.blob)
        return are_alike(*contents, request.result, items, request.comparison)


def _refuse_unsigned(job: FarmJob) -> None:
    if job.request.unit_price:
        detail = "the job pays, and a receipt needs the node's signature of its result"
        fix = "upgrade the node: pip install --upgrade hypergpu"
        raise HyperGPUError(Reason.SIGNATURE_INVALID, detail, fix=fix)

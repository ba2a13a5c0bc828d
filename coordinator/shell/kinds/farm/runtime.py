"""One farm job in this process: its input's chunks, and the results that are accepted so far."""

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import Any

import msgspec

from coordinator.core.farm.events import BundleAccepted, ItemDropped
from coordinator.core.farm.state import FarmJob
from coordinator.shell.driver.work_runtime import WorkRuntime
from coordinator.shell.store.journal.records import Entry
from hypergpu.assignment import PackedAssignment
from hypergpu.blobs import BlobRef
from hypergpu.farm.bundles import BundleChunk
from hypergpu.farm.item_chunks import ItemManifest
from hypergpu.ids import Digest

_ASSIGNMENTS_LEAST = 64
_ACCEPTED, _DROPPED = BundleAccepted.__name__, ItemDropped.__name__
_accepted_rows = msgspec.json.Decoder(BundleAccepted)
_dropped_rows = msgspec.json.Decoder(ItemDropped)


class InputChunks:
    """The chunks of an input by the positions of their items."""

    def __init__(self, manifest: ItemManifest) -> None:
        self.manifest = manifest
        self._starts = [0, *accumulate(chunk.items for chunk in manifest.chunks)]
        self.digests = frozenset(chunk.digest for chunk in manifest.chunks)

    def covering(self, start: int, items: int) -> tuple[BundleChunk, ...]:
        """The chunks that hold items [start, start + items), in order."""
        first = bisect_right(self._starts, start) - 1
        last = bisect_right(self._starts, start + items - 1)
        return tuple(
            BundleChunk(chunk.blob, self._starts[first + place], chunk.items)
            for place, chunk in enumerate(self.manifest.chunks[first:last])
        )


class FarmRuntime(WorkRuntime[FarmJob]):
    """One farm job in this process."""

    def __init__(self, job: FarmJob, next_sequence: int) -> None:
        super().__init__(job, next_sequence)
        self.chunks: InputChunks | None = None
        """None until its manifest is read."""
        self.accepted: list[BundleAccepted] = []
        """Accepted results in order of acceptance."""
        self._by_digest: dict[Digest, BundleAccepted] = {}
        self.assignments: dict[int, PackedAssignment] = {}
        """What was given out last, by lease: results are signed over it."""
        self.claims: dict[int, BlobRef] = {}
        """What nodes judge, by lease."""
        self.dropped: list[ItemDropped] = []
        """Items that were given up, in order."""
        self.has_read_rows = next_sequence == 0
        """Whether `accepted` and `dropped` are complete: after a restart rows are read first."""

    def advance(self, job: FarmJob, entries: Sequence[Entry]) -> None:
        """Take over what was persisted and wake whoever watches."""
        self.note_rows(entries)
        super().advance(job, entries)

    def note_rows(self, rows: Iterable[Entry]) -> None:
        """Take note of results and items in rows that follow on those noted before."""
        for row in rows:
            if row.kind == _ACCEPTED:
                result = _accepted_rows.decode(row.body_json)
                self.accepted.append(result)
                self._by_digest[result.blob.digest] = result
            elif row.kind == _DROPPED:
                self.dropped.append(_dropped_rows.decode(row.body_json))

    def note_assignment(self, assignment: PackedAssignment) -> None:
        """Take note of what a node is given, and now and then forget leases that are over."""
        self.assignments[assignment.lease.number] = assignment
        if len(self.assignments) > 2 * (len(self.job.leases) + _ASSIGNMENTS_LEAST):
            open_leases = {each.lease for _, each in self.job.all_leases()}
            self.assignments = {
                lease: each for lease, each in self.assignments.items() if lease in open_leases
            }

    def note_claims(self, lease: int, claims: BlobRef) -> None:
        """Take note of what is judged under a lease, and forget leases that are over."""
        open_leases = {each.lease for _, each in self.job.all_leases()}
        kept_claims = {each: blob for each, blob in self.claims.items() if each in open_leases}
        self.claims = {**kept_claims, lease: claims}

    def begin_rows(self, rows: Iterable[Entry]) -> None:
        """Take note of the rows of before this process, to which none was added meanwhile."""
        later_accepted, later_dropped = self.accepted, self.dropped
        self.accepted, self.dropped = [], []
        self.note_rows(rows)
        self.accepted += later_accepted
        self.dropped += later_dropped
        self.has_read_rows = True

    @property
    def input_digests(self) -> frozenset[Digest]:
        """Blobs that the job's work needs, as far as they are known."""
        request = self.job.request
        files = {request.manifest.digest, *(blob.digest for blob in request.files.values())}
        return frozenset(files) | (self.chunks.digests if self.chunks else frozenset())

    @property
    def result_digests(self) -> frozenset[Digest]:
        """Blobs of results: accepted ones, and those that are being compared."""
        compared_digests = {
            result.result.blob.digest
            for open_bundle in self.job.bundles.values()
            for result in (
                *open_bundle.results,
                *(vote.result for vote in open_bundle.votes),
            )
        }
        claim_digests = {blob.digest for blob in self.claims.values()}
        return frozenset(compared_digests | claim_digests | self._by_digest.keys())

    def accepted_result(self, digest: Digest) -> BundleAccepted | None:
        """The accepted result of a digest; None: there is none."""
        return self._by_digest.get(digest)


def farm_of(runtime: WorkRuntime[Any] | None) -> FarmRuntime | None:
    """The job, if it is a farm job."""
    return runtime if isinstance(runtime, FarmRuntime) else None

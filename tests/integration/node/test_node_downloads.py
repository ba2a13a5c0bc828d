import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import numpy as np
import pytest

from gpu_node.shell.folder.state import StatePaths
from gpu_node.shell.link.calls import Calls, DeliveredModel, Measurements, ReceivedTicket
from gpu_node.shell.transfer.cache import BlobCache
from gpu_node.shell.transfer.download import BlobSource, Download
from gpu_node.shell.transfer.inputs import Datasets, Models, manifest_entries
from hypergpu.assignment import Assignment, Delta
from hypergpu.blobs import BlobRef
from hypergpu.digests import digest_of
from hypergpu.errors import HyperGPUError, Reason
from hypergpu.ids import Digest
from hypergpu.line_limits import RANGE_BYTES_MIN
from hypergpu.part_file import DigestingPartFile, Span, missing_spans
from hypergpu.tensors.codec import apply_delta, encode_update
from hypergpu.tensors.layout import Flat, TensorSpec, layout_of
from hypergpu.units import Bytes, Milliseconds
from hypergpu.v1 import tensor_pb2
from hypergpu.wire.bulk_ranges import BulkBrokenError
from hypergpu.wire.messages import blob_value
from netsim.proxy.proxies import Proxies
from tests.integration.netsim.proxied import link, plan
from tests.integration.node.fake_coordinator import (
    CHUNK_BYTES,
    FakeCoordinator,
    Served,
    calls_to,
    open_calls,
    serve,
    state_paths_in,
)
from tests.unit.node.node_states import assignment, lease

CONTENT = np.random.default_rng(0).bytes(40 * CHUNK_BYTES + 17)
BLOB = BlobRef(digest_of(CONTENT), Bytes(len(CONTENT)))
LAYOUT = layout_of([TensorSpec("weight", (64, 100)), TensorSpec("bias", (10,))])


class DownloadKit:
    """A service, calls to it, and the cache under test."""

    def __init__(self, there: Served, calls: Calls, cache: BlobCache) -> None:
        self.there = there
        self.service = there.service
        self.address = there.address
        self.calls = calls
        self.cache = cache
        self.download = Download(cache)

    async def fetch(self, blob: BlobRef = BLOB, connections: int = 1) -> bytes:
        source = BlobSource(self.calls, connections)
        return (await self.download.fetch(source, blob)).read_bytes()

    def missing(self) -> list[Span]:
        """Ranges of the blob that are not on disk."""
        return list(missing_spans(self.cache.part(BLOB.digest), BLOB.size_bytes))


@pytest.fixture
async def kit(tmp_path: Path) -> AsyncIterator[DownloadKit]:
    with state_paths_in(tmp_path) as paths:
        async with serve() as there, calls_to(there.address) as calls:
            there.service.put(CONTENT)
            yield DownloadKit(there, calls, BlobCache(paths, Bytes(1 << 30)))


async def test_a_blob_is_fetched_once_and_then_taken_from_the_cache(kit: DownloadKit) -> None:
    assert await kit.fetch() == CONTENT
    assert await kit.fetch() == CONTENT
    assert kit.service.offsets == [0]


async def test_a_broken_download_goes_on_where_it_broke_off(kit: DownloadKit) -> None:
    kit.service.break_after_bytes = 20 * CHUNK_BYTES
    with pytest.raises(BulkBrokenError):
        await kit.fetch()
    received_bytes = kit.download.received_bytes
    assert 0 < received_bytes <= 20 * CHUNK_BYTES
    assert await kit.fetch() == CONTENT
    assert kit.service.offsets == [0, received_bytes]


async def test_a_damaged_partial_download_is_started_over(kit: DownloadKit) -> None:
    part = DigestingPartFile(kit.cache.part(BLOB.digest), BLOB.size_bytes)
    part.write(0, b"x" * CHUNK_BYTES)
    part.close()
    assert await kit.fetch() == CONTENT
    assert kit.service.offsets == [CHUNK_BYTES, 0]


async def test_a_download_written_over_a_discarded_file_is_whole(kit: DownloadKit) -> None:
    older = kit.service.put(CONTENT[::-1])
    await kit.fetch(blob_value(older))
    kit.cache.discard([blob_value(older).digest])
    assert await kit.fetch() == CONTENT
    assert not kit.cache.reuse(kit.cache.part(BLOB.digest), BLOB.size_bytes)


async def test_a_broken_download_over_a_discarded_file_keeps_only_its_own_bytes(
    kit: DownloadKit,
) -> None:
    older = blob_value(kit.service.put(CONTENT[::-1]))
    await kit.fetch(older)
    kit.cache.discard([older.digest])
    kit.service.break_after_bytes = 20 * CHUNK_BYTES
    before = kit.download.received_bytes
    with pytest.raises(BulkBrokenError):
        await kit.fetch()
    received_bytes = kit.download.received_bytes - before
    assert kit.missing() == [Span(received_bytes, len(CONTENT))]
    assert await kit.fetch() == CONTENT


async def test_a_blob_that_comes_as_something_else_is_refused(kit: DownloadKit) -> None:
    kit.service.blobs[BLOB.digest] = CONTENT[:-1] + b"x"
    with pytest.raises(HyperGPUError, match="DIGEST_MISMATCH"):
        await kit.fetch()
    assert not kit.cache.part(BLOB.digest).exists()


async def test_a_blob_damaged_on_disk_is_fetched_again_after_a_restart(kit: DownloadKit) -> None:
    await kit.fetch()
    path = kit.cache.path(BLOB.digest)
    path.write_bytes(b"y" + CONTENT[1:])
    fresh = DownloadKit(
        kit.there, kit.calls, BlobCache(StatePaths(path.parents[1]), Bytes(1 << 30))
    )
    assert await fresh.fetch() == CONTENT


async def test_the_cache_forgets_what_was_used_longest_ago_and_nothing_at_work(
    tmp_path: Path,
) -> None:
    with state_paths_in(tmp_path) as paths:
        cache = BlobCache(paths, Bytes(25))
        digests = [digest_of(bytes([number])) for number in range(4)]
        for age, digest in enumerate(digests):
            cache.path(digest).write_bytes(b"0123456789")
            os.utime(cache.path(digest), (age, age))
        cache.pin(frozenset(digests[:1]))
        cache.trim()
        left_paths = [cache.path(digest).exists() for digest in digests]
    assert left_paths == [True, False, False, True]


class DeltaChain:
    """Models of some rounds in a row and the deltas between them."""

    def __init__(self, kit: DownloadKit, folder: Path, *, rounds: int) -> None:
        floats = np.random.default_rng(1).normal(size=LAYOUT.parameters_count).astype(np.float32)
        difference = Flat(floats, np.empty(0, np.float32), np.empty(0, np.int64))
        (folder / "0").write_bytes(floats.tobytes())
        payload = folder / "delta"
        put = kit.service.put
        put(LAYOUT.to_json())
        self.models = [blob_value(put((folder / "0").read_bytes()))]
        self.deltas: list[Delta] = []
        for number in range(1, rounds + 1):
            difference.parameters[:] = number + np.arange(LAYOUT.parameters_count) % 7
            payload.write_bytes(encode_update(LAYOUT, "int4", difference).payload.tobytes())
            before, after = folder / str(number - 1), folder / str(number)
            apply_delta(before, payload, after, layout=LAYOUT, codec="int4")
            delta = blob_value(put(payload.read_bytes()))
            self.deltas.append(Delta(self.models[-1].digest, delta, "int4"))
            self.models.append(blob_value(put(after.read_bytes())))

    def assignment(self, number: int) -> Assignment:
        """Work on the model after that many rounds."""
        plain = assignment(lease())
        task = msgspec.structs.replace(plain.task, model=self.models[number], layout=LAYOUT.digest)
        deltas = tuple(self.deltas[:number])
        return msgspec.structs.replace(plain, task=task, deltas=deltas)


async def get_model(kit: DownloadKit, *wanted: Assignment) -> Digest:
    models = Models(kit.cache, kit.download)
    paths = [await models.get(BlobSource(kit.calls), each) for each in wanted]
    return digest_of(paths[-1].read_bytes())


async def test_a_model_is_made_of_the_one_before_by_its_delta(
    kit: DownloadKit, tmp_path: Path
) -> None:
    chain = DeltaChain(kit, tmp_path, rounds=1)
    del kit.service.blobs[chain.models[1].digest]
    assert await get_model(kit, chain.assignment(0), chain.assignment(1)) == chain.models[1].digest
    assert not kit.cache.path(chain.deltas[0].blob.digest).exists()


async def test_without_the_model_before_the_whole_model_is_fetched(
    kit: DownloadKit, tmp_path: Path
) -> None:
    chain = DeltaChain(kit, tmp_path, rounds=1)
    del kit.service.blobs[chain.deltas[0].blob.digest]
    assert await get_model(kit, chain.assignment(1)) == chain.models[1].digest


async def test_a_delta_that_gives_another_model_is_replaced_by_the_whole_model(
    kit: DownloadKit, tmp_path: Path
) -> None:
    chain = DeltaChain(kit, tmp_path, rounds=1)
    wrong = blob_value(kit.service.put(bytes(chain.deltas[0].blob.size_bytes)))
    astray = chain.assignment(1)
    delta = Delta(chain.models[0].digest, wrong, "int4")
    astray = msgspec.structs.replace(astray, deltas=(delta,))
    assert await get_model(kit, chain.assignment(0), astray) == chain.models[1].digest


async def test_a_node_that_missed_rounds_applies_the_deltas_since(
    kit: DownloadKit, tmp_path: Path
) -> None:
    chain = DeltaChain(kit, tmp_path, rounds=4)
    del kit.service.blobs[chain.models[-1].digest]
    assert await get_model(kit, chain.assignment(1), chain.assignment(4)) == chain.models[4].digest
    held_names = {path.name for path in kit.cache.path(chain.models[0].digest).parent.iterdir()}
    assert held_names >= {chain.models[1].digest, chain.models[4].digest}
    assert not held_names & {model.digest for model in chain.models[2:4]}


async def test_the_newest_model_here_is_what_deltas_lead_on_from(
    kit: DownloadKit, tmp_path: Path
) -> None:
    chain = DeltaChain(kit, tmp_path, rounds=4)
    await get_model(kit, chain.assignment(1), chain.assignment(3))
    for blob in (*(delta.blob for delta in chain.deltas[:3]), chain.models[4]):
        kit.service.blobs.pop(blob.digest)
    assert await get_model(kit, chain.assignment(4)) == chain.models[4].digest


async def test_a_delta_that_is_gone_from_the_middle_is_no_loss(
    kit: DownloadKit, tmp_path: Path
) -> None:
    chain = DeltaChain(kit, tmp_path, rounds=4)
    del kit.service.blobs[chain.deltas[2].blob.digest]
    assert await get_model(kit, chain.assignment(1), chain.assignment(4)) == chain.models[4].digest


async def test_deltas_larger_than_the_model_are_left_alone(
    kit: DownloadKit, tmp_path: Path
) -> None:
    chain = DeltaChain(kit, tmp_path, rounds=12)
    for delta in chain.deltas:
        del kit.service.blobs[delta.blob.digest]
    assert (
        await get_model(kit, chain.assignment(0), chain.assignment(12)) == chain.models[12].digest
    )


async def test_only_the_last_two_models_of_a_job_are_kept(kit: DownloadKit) -> None:
    names = [digest_of(bytes([number])) for number in range(3)]
    for name in names:
        kit.cache.path(name).write_bytes(b"")
        kit.cache.use_model(lease().job_id, name)
    assert [kit.cache.path(name).exists() for name in names] == [False, True, True]


def manifest(service: FakeCoordinator, files: dict[str, bytes]) -> BlobRef:
    entries = [
        tensor_pb2.ManifestEntry(path=path, blob=service.put(content))
        for path, content in files.items()
    ]
    return blob_value(service.put(tensor_pb2.Manifest(entries=entries).SerializeToString()))


async def test_a_dataset_becomes_a_folder_of_its_files(kit: DownloadKit) -> None:
    files = {"a.txt": b"a", "deep/er/b.txt": b"", "deep/c.txt": b"a"}
    datasets = Datasets(kit.cache, kit.download)
    folder = await datasets.fetch(BlobSource(kit.calls), manifest(kit.service, files))
    assert {path: (folder / path).read_bytes() for path in files} == files


async def test_a_dataset_file_that_is_not_what_its_digest_says_is_refused(kit: DownloadKit) -> None:
    own_manifest = manifest(kit.service, {"a.txt": b"honest"})
    kit.service.blobs[digest_of(b"honest")] = b"forged"
    with pytest.raises(HyperGPUError, match="DIGEST_MISMATCH"):
        await Datasets(kit.cache, kit.download).fetch(BlobSource(kit.calls), own_manifest)
    assert not kit.cache.dataset(own_manifest.digest).exists()


async def test_a_dataset_changed_on_disk_is_brought_again_after_a_restart(kit: DownloadKit) -> None:
    own_manifest = manifest(kit.service, {"a.txt": b"honest"})
    folder = await Datasets(kit.cache, kit.download).fetch(BlobSource(kit.calls), own_manifest)
    (folder / "a.txt").write_bytes(b"forged")
    fresh = BlobCache(StatePaths(folder.parents[1]), Bytes(1 << 30))
    await Datasets(fresh, Download(fresh)).fetch(BlobSource(kit.calls), own_manifest)
    assert (folder / "a.txt").read_bytes() == b"honest"


async def test_a_dataset_s_file_is_no_blob_to_fetch_again_and_is_never_written_over(
    kit: DownloadKit,
) -> None:
    content = CONTENT[:2_000]
    own_manifest = manifest(kit.service, {"base/weights": content})
    folder = await Datasets(kit.cache, kit.download).fetch(BlobSource(kit.calls), own_manifest)
    blob = BlobRef(digest_of(content), Bytes(len(content)))
    kit.service.blobs.pop(blob.digest)  # Whoever asked for it would be refused.
    assert await kit.fetch(blob) == content
    kit.cache.discard([blob.digest])
    other = kit.service.put(content[::-1])
    assert await kit.fetch(blob_value(other)) == content[::-1]
    assert (folder / "base/weights").read_bytes() == content


@pytest.mark.parametrize(
    "path", ["", "/etc/passwd", "../x", "a/../../x", "a//b", "./a", "a\\b", "a\x00b", "a" * 2000]
)
def test_a_path_that_leads_elsewhere_is_refused(path: str) -> None:
    entry = tensor_pb2.ManifestEntry(
        path=path, blob=tensor_pb2.BlobRef(digest=tensor_pb2.Digest(value=bytes(32)))
    )
    with pytest.raises(HyperGPUError) as failure:
        manifest_entries(tensor_pb2.Manifest(entries=[entry]).SerializeToString())
    assert failure.value.reason is Reason.MANIFEST_INVALID


@pytest.mark.parametrize("paths", [("a", "a"), ("a", "a/b")])
def test_paths_that_exclude_each_other_are_refused(paths: tuple[str, ...]) -> None:
    blob = tensor_pb2.BlobRef(digest=tensor_pb2.Digest(value=bytes(32)))
    entries = [tensor_pb2.ManifestEntry(path=path, blob=blob) for path in paths]
    with pytest.raises(HyperGPUError, match="MANIFEST_INVALID"):
        manifest_entries(tensor_pb2.Manifest(entries=entries).SerializeToString())


async def test_a_blob_comes_in_ranges_over_several_connections(kit: DownloadKit) -> None:
    assert await kit.fetch(connections=4) == CONTENT
    quarter = -(-len(CONTENT) // 4)
    assert {0, quarter, 2 * quarter, 3 * quarter} <= set(kit.service.offsets)
    assert kit.download.received_bytes == len(CONTENT)


async def test_what_came_when_a_connection_broke_is_not_asked_for_again(kit: DownloadKit) -> None:
    kit.service.break_after_bytes = 2 * CHUNK_BYTES  # of the range that is asked for first
    with pytest.raises(BulkBrokenError):
        await kit.fetch(connections=4)
    missing_bytes = sum(span.end - span.start for span in kit.missing())
    assert 0 < missing_bytes < len(CONTENT)
    kit.service.asked_bytes = 0
    assert await kit.fetch() == CONTENT
    assert kit.service.asked_bytes == missing_bytes


async def test_a_range_that_hangs_is_asked_for_again_by_an_idle_connection(
    kit: DownloadKit,
) -> None:
    hang_event = kit.service.breaking[0] = asyncio.Event()
    assert await kit.fetch(connections=2) == CONTENT
    hang_event.set()
    assert kit.service.offsets.count(0) == 2


async def test_a_kill_costs_only_what_was_not_written(kit: DownloadKit) -> None:
    part = DigestingPartFile(kit.cache.part(BLOB.digest), BLOB.size_bytes)
    middle = Span(7 * CHUNK_BYTES, 9 * CHUNK_BYTES)
    part.write(middle.start, CONTENT[middle.start : middle.end])
    del part  # as after a kill: nothing was closed in good order
    assert await kit.fetch() == CONTENT
    assert kit.service.offsets == [0, middle.end]


async def test_a_ticket_that_grows_old_is_renewed(kit: DownloadKit) -> None:
    kit.service.ticket_life_ms = 0
    assert await kit.fetch(connections=2) == CONTENT
    assert kit.service.tickets > 1


def given_source(kit: DownloadKit) -> BlobSource:
    """A source with a ticket for the blob that need not be asked for."""
    ticket = ReceivedTicket.now(kit.service.ticket(BLOB.digest, BLOB.size_bytes))
    return BlobSource(kit.calls, 2, {BLOB.digest: DeliveredModel(ticket)})


async def test_a_ticket_that_is_there_is_not_asked_for(kit: DownloadKit) -> None:
    path = await kit.download.fetch(given_source(kit), BLOB)
    assert path.read_bytes() == CONTENT
    assert not kit.service.tickets


async def test_a_blob_that_came_with_its_work_is_not_fetched_and_measures_no_line(
    kit: DownloadKit,
) -> None:
    measurements = Measurements()
    download = Download(kit.cache, measurements)
    source = BlobSource(kit.calls, 2, {BLOB.digest: DeliveredModel(content=CONTENT)})
    assert (await download.fetch(source, BLOB)).read_bytes() == CONTENT
    assert (kit.service.tickets, kit.service.offsets) == (0, [])
    assert download.received_bytes == BLOB.size_bytes
    assert not measurements.has_transfers
    assert await kit.fetch() == CONTENT
    assert kit.service.tickets == 0


@pytest.mark.parametrize("content", [CONTENT[:-1] + b"x", CONTENT[:-1], CONTENT + b"x", b"x"])
async def test_a_blob_that_came_with_its_work_as_something_else_is_fetched(
    kit: DownloadKit, content: bytes
) -> None:
    source = BlobSource(kit.calls, 1, {BLOB.digest: DeliveredModel(content=content)})
    assert (await kit.download.fetch(source, BLOB)).read_bytes() == CONTENT
    assert kit.service.tickets == 1


async def test_a_blob_that_came_with_its_work_replaces_what_a_fetch_left(kit: DownloadKit) -> None:
    kit.service.break_after_bytes = 20 * CHUNK_BYTES
    with pytest.raises(BulkBrokenError):
        await kit.fetch()
    source = BlobSource(kit.calls, 1, {BLOB.digest: DeliveredModel(content=CONTENT)})
    assert (await kit.download.fetch(source, BLOB)).read_bytes() == CONTENT
    assert not kit.cache.part(BLOB.digest).exists()


async def test_a_ticket_that_was_there_too_long_is_asked_for(kit: DownloadKit) -> None:
    kit.service.ticket_life_ms = 0
    await kit.download.fetch(given_source(kit), BLOB)
    assert kit.service.tickets


async def test_a_given_ticket_that_led_to_something_else_is_used_once(kit: DownloadKit) -> None:
    kit.service.blobs[BLOB.digest] = CONTENT[:-1] + b"x"
    with pytest.raises(HyperGPUError, match="DIGEST_MISMATCH"):
        await kit.download.fetch(given_source(kit), BLOB)
    assert kit.service.tickets == 1


async def test_a_small_blob_comes_over_one_connection(kit: DownloadKit) -> None:
    small = blob_value(kit.service.put(CONTENT[: 2 * RANGE_BYTES_MIN - 1]))
    await kit.fetch(small, connections=8)
    assert kit.service.offsets == [0]


def _slowly(port: int, mbit_s: float) -> Proxies:
    """A line to the store that takes longer for a piece than a small call may take."""
    return Proxies(plan(port, node=link(1, mbit_s)))


@pytest.mark.parametrize("connections", [1, 2])
async def test_a_piece_may_take_longer_than_a_small_call(
    kit: DownloadKit, connections: int
) -> None:
    blob = blob_value(kit.service.put(CONTENT[: 4 * CHUNK_BYTES]))
    async with _slowly(kit.service.bulk_port, 0.2) as proxies:
        host, kit.service.bulk_port = proxies.address("node")
        assert host == "127.0.0.1"
        calls = open_calls(kit.address, timeout_ms=Milliseconds(2_000))
        path = await kit.download.fetch(BlobSource(calls, connections), blob)
        assert path.read_bytes() == CONTENT[: 4 * CHUNK_BYTES]
        await calls.close()

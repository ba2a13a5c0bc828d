import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import msgspec
import numpy as np
import pytest

from gpu_node.shell.cache import BlobCache
from gpu_node.shell.calls import Calls
from gpu_node.shell.control import BulkConnections
from gpu_node.shell.download import Download
from gpu_node.shell.inputs import Datasets, Models, manifest_entries
from gpu_node.shell.state import StatePaths
from hypergpu.crypto import digest_of
from hypergpu.errors import HyperGPUError, Reason
from hypergpu.ids import Digest
from hypergpu.statements import Assignment, BlobRef, Delta
from hypergpu.streams import STRIPE_BYTES_MIN
from hypergpu.tensors.codec import apply_delta, encode_update
from hypergpu.tensors.layout import Flat, TensorSpec, layout_of
from hypergpu.units import Bytes, Milliseconds
from hypergpu.v1 import tensor_pb2
from hypergpu.wire.chunks import BlobPiece
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

    async def fetch(self, blob: BlobRef = BLOB) -> bytes:
        return (await self.download.fetch(self.calls, blob)).read_bytes()


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
    with pytest.raises(grpc.aio.AioRpcError):
        await kit.fetch()
    assert kit.download.received_bytes == 20 * CHUNK_BYTES
    assert await kit.fetch() == CONTENT
    assert kit.service.offsets == [0, 20 * CHUNK_BYTES]


async def test_a_damaged_partial_download_is_started_over(kit: DownloadKit) -> None:
    kit.cache.part(BLOB.digest).write_bytes(b"x" * CHUNK_BYTES)
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
    with pytest.raises(grpc.aio.AioRpcError):
        await kit.fetch()
    assert kit.cache.part(BLOB.digest).read_bytes() == CONTENT[: 20 * CHUNK_BYTES]
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
        left = [cache.path(digest).exists() for digest in digests]
    assert left == [True, False, False, True]


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
            apply_delta(before, payload, after, layout=LAYOUT, scheme="int4")
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
    paths = [await models.get(kit.calls, each) for each in wanted]
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
    held = {path.name for path in kit.cache.path(chain.models[0].digest).parent.iterdir()}
    assert held >= {chain.models[1].digest, chain.models[4].digest}
    assert not held & {model.digest for model in chain.models[2:4]}


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
    folder = await datasets.fetch(kit.calls, manifest(kit.service, files))
    assert {path: (folder / path).read_bytes() for path in files} == files


async def test_a_dataset_file_that_is_not_what_its_digest_says_is_refused(kit: DownloadKit) -> None:
    listing = manifest(kit.service, {"a.txt": b"honest"})
    kit.service.blobs[digest_of(b"honest")] = b"forged"
    with pytest.raises(HyperGPUError, match="DIGEST_MISMATCH"):
        await Datasets(kit.cache, kit.download).fetch(kit.calls, listing)
    assert not kit.cache.dataset(listing.digest).exists()


async def test_a_dataset_changed_on_disk_is_brought_again_after_a_restart(kit: DownloadKit) -> None:
    listing = manifest(kit.service, {"a.txt": b"honest"})
    folder = await Datasets(kit.cache, kit.download).fetch(kit.calls, listing)
    (folder / "a.txt").write_bytes(b"forged")
    fresh = BlobCache(StatePaths(folder.parents[1]), Bytes(1 << 30))
    await Datasets(fresh, Download(fresh)).fetch(kit.calls, listing)
    assert (folder / "a.txt").read_bytes() == b"honest"


@pytest.mark.parametrize(
    "path", ["", "/etc/passwd", "../x", "a/../../x", "a//b", "./a", "a\\b", "a\x00b", "a" * 2000]
)
def test_a_path_that_leads_elsewhere_is_refused(path: str) -> None:
    entry = tensor_pb2.ManifestEntry(
        path=path, blob=tensor_pb2.BlobRef(digest=tensor_pb2.Digest(value=bytes(32)))
    )
    with pytest.raises(HyperGPUError) as refused:
        manifest_entries(tensor_pb2.Manifest(entries=[entry]).SerializeToString())
    assert refused.value.reason is Reason.MANIFEST_INVALID


@pytest.mark.parametrize("paths", [("a", "a"), ("a", "a/b")])
def test_paths_that_exclude_each_other_are_refused(paths: tuple[str, ...]) -> None:
    blob = tensor_pb2.BlobRef(digest=tensor_pb2.Digest(value=bytes(32)))
    entries = [tensor_pb2.ManifestEntry(path=path, blob=blob) for path in paths]
    with pytest.raises(HyperGPUError, match="MANIFEST_INVALID"):
        manifest_entries(tensor_pb2.Manifest(entries=entries).SerializeToString())


async def _over_four(kit: DownloadKit) -> bytes:
    bulk = BulkConnections(lambda: open_calls(kit.address))
    async with bulk.open(kit.calls, 4) as calls:
        try:
            return (await kit.download.fetch(calls, BLOB)).read_bytes()
        finally:
            await bulk.close()


async def test_a_blob_comes_in_ranges_over_several_connections(kit: DownloadKit) -> None:
    assert await _over_four(kit) == CONTENT
    quarter = -(-len(CONTENT) // 4)
    assert sorted(kit.service.offsets) == [0, quarter, 2 * quarter, 3 * quarter]


async def test_ranges_go_on_behind_the_last_byte_without_a_gap_before_it(kit: DownloadKit) -> None:
    kit.service.break_after_bytes = 2 * CHUNK_BYTES  # of the range that is asked for first
    with pytest.raises(grpc.aio.AioRpcError):
        await _over_four(kit)
    held = kit.cache.part(BLOB.digest).read_bytes()
    assert held == CONTENT[: len(held)]
    before = len(kit.service.offsets)
    assert await kit.fetch() == CONTENT
    assert all(offset >= len(held) for offset in kit.service.offsets[before:])


async def test_what_came_before_its_turn_when_a_connection_broke_is_not_asked_for_again(
    kit: DownloadKit,
) -> None:
    may_break = kit.service.breaking[0] = asyncio.Event()
    broken = asyncio.create_task(_over_four(kit))
    early_bytes, others_bytes = 0, len(CONTENT) - -(-len(CONTENT) // 4)
    while early_bytes < others_bytes:
        await asyncio.sleep(0)
        early_bytes = sum(piece.payload.nbytes for piece in kit.download._early[1].values())
    may_break.set()
    with pytest.raises(grpc.aio.AioRpcError):
        await broken
    kit.service.asked_bytes = 0
    assert await kit.fetch() == CONTENT
    assert kit.service.asked_bytes == len(CONTENT) - early_bytes


async def test_early_pieces_that_are_damaged_are_fetched_again(kit: DownloadKit) -> None:
    damaged = BlobPiece(3 * CHUNK_BYTES, memoryview(bytes(5 * CHUNK_BYTES)))
    kit.download._early = (BLOB.digest, {damaged.offset: damaged})
    assert await kit.fetch() == CONTENT
    assert kit.service.asked_bytes == 2 * len(CONTENT) - 5 * CHUNK_BYTES


async def test_a_small_blob_comes_over_one_connection(kit: DownloadKit) -> None:
    small = blob_value(kit.service.put(CONTENT[: 2 * STRIPE_BYTES_MIN - 1]))
    bulk = BulkConnections(lambda: open_calls(kit.address))
    async with bulk.open(kit.calls, 8) as calls:
        await kit.download.fetch(calls, small)
        assert bulk.count == 7
    await bulk.close()
    assert kit.service.offsets == [0]


async def test_connections_that_are_let_go_are_given_to_nobody(kit: DownloadKit) -> None:
    bulk = BulkConnections(lambda: open_calls(kit.address))
    async with bulk.open(kit.calls, 4) as calls:
        before = calls.further
    bulk._close_further()  # as after two idle minutes, just before the next work begins
    async with bulk.open(kit.calls, 4) as calls:
        assert not set(calls.further) & set(before)
        await asyncio.gather(*bulk._closing)
        assert (await kit.download.fetch(calls, BLOB)).read_bytes() == CONTENT
    await bulk.close()
    assert bulk.count == 0


async def test_connections_that_cannot_all_be_opened_leave_none_behind(kit: DownloadKit) -> None:
    opened = iter([open_calls(kit.address)])

    def open_one() -> Calls:
        try:
            return next(opened)
        except StopIteration:
            raise HyperGPUError(Reason.FILE_UNUSABLE, "the certificate is gone") from None

    bulk = BulkConnections(open_one)
    with pytest.raises(HyperGPUError, match="FILE_UNUSABLE"):
        async with bulk.open(kit.calls, 3):
            pass
    assert bulk._end is not None
    await bulk.close()


def _slowly(address: str, mbit_s: float) -> Proxies:
    """A line to the service that takes longer for a piece than a small call may take."""
    return Proxies(plan(int(address.rpartition(":")[2]), node=link(1, mbit_s)))


@pytest.mark.parametrize("connections", [1, 2])
async def test_a_piece_may_take_longer_than_a_small_call(
    kit: DownloadKit, connections: int
) -> None:
    blob = blob_value(kit.service.put(CONTENT[: 4 * CHUNK_BYTES]))
    async with _slowly(kit.address, 0.2) as proxies:
        host, port = proxies.address("node")
        bulk = BulkConnections(lambda: open_calls(f"{host}:{port}", timeout_ms=Milliseconds(2_000)))
        async with bulk.open(kit.calls, connections + 1) as calls:
            first, *others = calls.further
            path = await kit.download.fetch(first.with_further(tuple(others)), blob)
            assert path.read_bytes() == CONTENT[: 4 * CHUNK_BYTES]
        await bulk.close()
    assert len(kit.service.offsets) == connections

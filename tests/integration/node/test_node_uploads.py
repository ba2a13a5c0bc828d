from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import numpy as np
import pytest
from msgspec.structs import replace

from gpu_node.core.events import TrainedUpdate
from gpu_node.shell.access import rejection_in
from gpu_node.shell.calls import Calls
from gpu_node.shell.control import BulkConnections
from gpu_node.shell.state import NonceCounter, StatePaths
from gpu_node.shell.transfers import Uploader
from hypergpu.crypto import IdentityKey, digest_of
from hypergpu.errors import HyperGPUError, Reason
from hypergpu.streams import PIECE_BYTES
from hypergpu.units import Bytes, Samples
from hypergpu.v1 import node_pb2
from hypergpu.wire.chunks import CHUNK_BYTES, encode_chunk
from tests.integration.node.fake_coordinator import (
    Served,
    calls_to,
    is_signed,
    open_calls,
    serve,
    state_paths_in,
    terms_for,
)
from tests.unit.node.node_states import assignment, lease

CONTENT = np.random.default_rng(2).bytes(9 * CHUNK_BYTES + 5)
UPDATE = TrainedUpdate(digest_of(CONTENT), Bytes(len(CONTENT)), inner_steps=4, samples=Samples(32))
LEASE = lease()
WORK = replace(assignment(LEASE), terms=terms_for(LEASE.job_id), epoch=1)


class UploadKit:
    """A service, calls to it, and an update to send there."""

    def __init__(self, there: Served, calls: Calls, paths: StatePaths) -> None:
        self.service = there.service
        self.address = there.address
        self.calls = calls
        self.paths = paths
        self.identity = IdentityKey.generate()
        self.path = paths.update(LEASE.job_id, LEASE.round)
        self.path.parent.mkdir()
        self.path.write_bytes(CONTENT)
        self.uploader = Uploader(paths, self.identity)
        self.uploader.note_finished(LEASE)

    async def send(self) -> None:
        await self.uploader.send(self.calls, WORK, UPDATE)


@pytest.fixture
async def kit(tmp_path: Path) -> AsyncIterator[UploadKit]:
    with state_paths_in(tmp_path) as paths:
        async with serve() as there, calls_to(there.address) as calls:
            yield UploadKit(there, calls, paths)


async def test_a_fresh_update_is_sent_from_its_start(kit: UploadKit) -> None:
    await kit.send()
    assert bytes(kit.service.stored) == CONTENT
    assert kit.service.offsets == [0]


async def test_a_broken_upload_goes_on_at_the_committed_offset(kit: UploadKit) -> None:
    kit.service.break_after_bytes = 3 * CHUNK_BYTES
    with pytest.raises(grpc.aio.AioRpcError):
        await kit.send()
    await kit.send()
    assert kit.service.offsets == [0, 3 * CHUNK_BYTES]
    assert bytes(kit.service.stored) == CONTENT


async def test_every_attempt_has_a_nonce_above_all_before_it(kit: UploadKit) -> None:
    kit.service.break_after_bytes = CHUNK_BYTES
    with pytest.raises(grpc.aio.AioRpcError):
        await kit.send()
    kit.service.accepted.clear()
    kit.uploader = Uploader(kit.paths, kit.identity)  # the daemon was started again
    await kit.send()
    first, second = kit.service.nonces
    assert second > first


async def test_an_update_that_is_accepted_already_is_not_sent_again(kit: UploadKit) -> None:
    kit.service.accepted.add(UPDATE.digest)
    await Uploader(kit.paths, kit.identity).send(kit.calls, WORK, UPDATE)
    assert kit.service.offsets == []


async def test_a_missing_update_is_refused_before_anything_is_sent(kit: UploadKit) -> None:
    kit.path.unlink()
    with pytest.raises(HyperGPUError, match="FILE_UNUSABLE"):
        await kit.send()
    assert kit.service.nonces == []


async def test_an_update_damaged_on_disk_is_known_by_its_digest(kit: UploadKit) -> None:
    kit.path.write_bytes(b"x" + CONTENT[1:])
    with pytest.raises(HyperGPUError, match="damaged"):
        await kit.uploader.check_undamaged(LEASE, UPDATE)


async def test_an_attempt_that_stored_more_than_the_last_has_progressed(kit: UploadKit) -> None:
    assert not kit.uploader.has_progressed
    kit.service.break_after_bytes = 2 * CHUNK_BYTES
    with pytest.raises(grpc.aio.AioRpcError):
        await kit.send()
    kit.service.break_after_bytes = 2 * CHUNK_BYTES
    with pytest.raises(grpc.aio.AioRpcError):
        await kit.send()
    assert kit.uploader.has_progressed


def test_nonces_only_grow_also_when_the_clock_goes_back(tmp_path: Path) -> None:
    with state_paths_in(tmp_path) as paths:
        far_ahead = 1 << 50
        paths.nonce.write_text(str(far_ahead))
        first = [NonceCounter(paths).take() for _ in range(2)]
        nonces = NonceCounter(paths)
        second = [nonces.take() for _ in range(2000)]
    assert first[0] >= far_ahead
    assert first[1] > first[0]
    assert second == sorted(set(second))
    assert second[0] > first[1]


async def _over_four(kit: UploadKit) -> None:
    bulk = BulkConnections(lambda: open_calls(kit.address))
    async with bulk.open(kit.calls, 4) as calls:
        try:
            await kit.uploader.send(calls, WORK, UPDATE)
        finally:
            await bulk.close()


async def test_an_update_goes_in_stripes_under_one_nonce_over_several_connections(
    kit: UploadKit,
) -> None:
    await _over_four(kit)
    assert UPDATE.digest in kit.service.accepted
    assert sorted(header.stripe for header in kit.service.headers) == [0, 1, 2, 3]
    assert {header.stripes for header in kit.service.headers} == {4}
    assert len(set(kit.service.nonces)) == 1
    assert all(is_signed(kit.identity.node_id, header, WORK) for header in kit.service.headers)
    starts = [header.offset for header in sorted(kit.service.headers, key=lambda h: h.stripe)]
    assert starts == [number * len(CONTENT) // 4 for number in range(4)]


async def test_each_stripe_goes_on_where_it_broke_off_under_a_fresh_nonce(kit: UploadKit) -> None:
    kit.service.break_after_bytes = 2 * PIECE_BYTES  # of one stripe; the others may end or not
    with pytest.raises(grpc.aio.AioRpcError):
        await _over_four(kit)
    before = kit.service.headers[0].nonce
    await _over_four(kit)
    assert UPDATE.digest in kit.service.accepted
    again = [header for header in kit.service.headers if header.nonce != before]
    assert len(again) == 4
    assert min(header.nonce for header in again) > before
    # Two pieces of some stripe had come, and nothing of it comes twice.
    starts = [header.stripe * len(CONTENT) // 4 for header in again]
    assert any(
        header.offset >= start + 2 * PIECE_BYTES
        for header, start in zip(again, starts, strict=True)
    )


@pytest.mark.parametrize(("bulk_bytes", "sends_bulk_unasked"), [(8 << 10, True), (64 << 10, False)])
async def test_what_one_window_carries_goes_unasked_and_still_meets_its_refusal(
    kit: UploadKit, bulk_bytes: int, *, sends_bulk_unasked: bool
) -> None:
    kit.service.rejection = HyperGPUError(Reason.LEASE_STALE, "another round is open")
    taken: list[str] = []

    async def messages() -> AsyncIterator[bytes]:
        taken.append("header")
        yield node_pb2.SubmitUpdateRequest(header=node_pb2.UpdateHeader()).SerializeToString()
        taken.append("bulk")
        yield encode_chunk(2, 0, memoryview(bytes(bulk_bytes)))

    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await kit.calls.submit(messages(), 240.0, bulk_bytes)
    assert rejection_in(refused.value) is not None
    assert ("bulk" in taken) == sends_bulk_unasked

from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import numpy as np
import pytest
from msgspec.structs import replace

from gpu_node.core.commands import FetchInputs
from gpu_node.core.events import InputsFetched, TrainedUpdate, TrainingFinished
from gpu_node.core.phases import PhaseClock
from gpu_node.shell.folder.state import NonceCounter, StatePaths
from gpu_node.shell.link.calls import Calls
from gpu_node.shell.link.channel import rejection_in
from gpu_node.shell.transfer.uploads import Uploader, check_epoch
from hypergpu.crypto import IdentityKey
from hypergpu.digests import digest_of, digest_to_wire
from hypergpu.errors import HyperGPUError, Reason
from hypergpu.part_file import Span
from hypergpu.units import Bytes, Milliseconds, Samples
from hypergpu.wire.bulk_ranges import BulkBrokenError
from tests.integration.node.fake_coordinator import (
    CHUNK_BYTES,
    Served,
    calls_to,
    is_signed,
    serve,
    state_paths_in,
    terms_for,
)
from tests.unit.node.node_states import assignment, lease

CONTENT = np.random.default_rng(2).bytes(9 * CHUNK_BYTES + 5)
UPDATE = TrainedUpdate(digest_of(CONTENT), Bytes(len(CONTENT)), inner_steps=4, samples=Samples(32))
LEASE = lease()
NOW = Milliseconds(0)
WORK = replace(assignment(LEASE), terms=terms_for(LEASE.job_id), epoch=1)


class UploadKit:
    """A service, calls to it, and an update to send there."""

    def __init__(self, there: Served, calls: Calls, paths: StatePaths) -> None:
        self.service = there.service
        self.address = there.address
        self.calls = calls
        calls.bulk_port = there.service.bulk_port
        self.paths = paths
        self.identity = IdentityKey.generate()
        self.path = paths.update(LEASE.job_id, LEASE.round)
        self.path.parent.mkdir()
        self.path.write_bytes(CONTENT)
        phases = PhaseClock()
        phases.note(InputsFetched(at_ms=NOW, lease=LEASE), (FetchInputs(WORK),))
        phases.note(TrainingFinished(at_ms=NOW, lease=LEASE, update=UPDATE), ())
        self.uploader = Uploader(paths, self.identity, phases=phases)

    async def send(self, connections: int = 1) -> None:
        work = replace(WORK, connections=connections)
        await self.uploader.send(self.calls, work, UPDATE)

    async def expect_break(self, after_bytes: int, connections: int = 1) -> None:
        """Let a request end early, and the attempt with it."""
        self.service.break_after_bytes = after_bytes
        with pytest.raises(BulkBrokenError):
            await self.send(connections)


@pytest.fixture
async def kit(tmp_path: Path) -> AsyncIterator[UploadKit]:
    with state_paths_in(tmp_path) as paths:
        async with serve() as there, calls_to(there.address) as calls:
            yield UploadKit(there, calls, paths)


async def test_a_fresh_update_is_sent_from_its_start(kit: UploadKit) -> None:
    await kit.send()
    assert bytes(kit.service.stored) == CONTENT
    assert kit.service.offsets == [0]


async def test_a_broken_upload_sends_only_what_is_missing(kit: UploadKit) -> None:
    await kit.expect_break(3 * CHUNK_BYTES)
    held_bytes = sum(end - start for start, end in kit.service.held[-1:])
    await kit.send()
    assert held_bytes >= 3 * CHUNK_BYTES
    assert kit.service.offsets == [0, held_bytes]
    assert bytes(kit.service.stored) == CONTENT


async def test_every_attempt_has_a_nonce_above_all_before_it(kit: UploadKit) -> None:
    await kit.expect_break(CHUNK_BYTES)
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
    await kit.expect_break(2 * CHUNK_BYTES)
    await kit.expect_break(2 * CHUNK_BYTES)
    assert kit.uploader.has_progressed


async def test_an_object_stores_ticket_is_renewed_by_a_fresh_offer(kit: UploadKit) -> None:
    kit.calls.bulk_port = 0
    kit.service.ticket_life_ms = 0
    await kit.send(connections=4)
    assert len(kit.service.offers) > 1
    assert kit.service.nonces == sorted(set(kit.service.nonces))
    assert bytes(kit.service.stored) == CONTENT


async def test_bytes_that_an_object_store_lacks_at_the_commit_are_asked_for_again(
    kit: UploadKit,
) -> None:
    kit.calls.bulk_port = 0
    kit.service.offered = digest_to_wire(UPDATE.digest)
    kit.service.held = [Span(0, CHUNK_BYTES)]
    kit.service.stored = bytearray(len(CONTENT))
    with pytest.raises(grpc.aio.AioRpcError) as failure:
        await kit.send()
    rejection = rejection_in(failure.value)
    assert rejection is not None
    assert rejection.reason is Reason.OFFSET_MISMATCH


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


async def test_an_update_goes_over_several_connections_under_one_offer(kit: UploadKit) -> None:
    await kit.send(connections=4)
    assert UPDATE.digest in kit.service.accepted
    (offer,) = kit.service.offers
    assert is_signed(kit.identity.node_id, offer, WORK)
    assert len(kit.service.offsets) >= 4


async def test_what_breaks_on_one_connection_is_sent_again_by_another(kit: UploadKit) -> None:
    await kit.expect_break(2 * CHUNK_BYTES, connections=4)
    await kit.send(connections=4)
    assert UPDATE.digest in kit.service.accepted
    assert bytes(kit.service.stored) == CONTENT


async def test_an_update_is_signed_again_for_the_epoch_that_is_open_and_for_nothing_else(
    kit: UploadKit,
) -> None:
    kit.service.open_epoch = 3
    await kit.send()
    first, second = kit.service.offers
    assert is_signed(kit.identity.node_id, first, WORK)
    assert (first.epoch, second.epoch) == (1, 3)
    assert is_signed(kit.identity.node_id, second, replace(WORK, epoch=3))
    assert second.nonce > first.nonce
    assert bytes(kit.service.stored) == CONTENT


async def test_a_later_offer_of_the_same_work_is_signed_for_the_epoch_that_was_told(
    kit: UploadKit,
) -> None:
    kit.service.open_epoch = 3
    await kit.expect_break(2 * CHUNK_BYTES)
    await kit.send()
    assert [each.epoch for each in kit.service.offers] == [1, 3, 3]


@pytest.mark.parametrize("asked", [18, 2**32 - 1])
async def test_no_epoch_is_signed_for_that_the_work_cannot_be_of(
    kit: UploadKit, asked: int
) -> None:
    kit.service.open_epoch = asked
    with pytest.raises(HyperGPUError, match="it can be of 2 to 17") as failure:
        await kit.send()
    assert failure.value.reason is Reason.REQUEST_INVALID
    assert len(kit.service.offers) == 1
    assert kit.service.held == []


def test_an_epoch_that_is_no_later_is_not_signed_for_again() -> None:
    with pytest.raises(HyperGPUError, match="signed for epoch 1"):
        check_epoch(WORK, signed=1, asked=1)

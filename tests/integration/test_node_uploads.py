from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import numpy as np
import pytest

from gpu_node.core.assignment import Lease, Update
from gpu_node.shell.link.bulk import CHUNK_BYTES
from gpu_node.shell.link.calls import Calls
from gpu_node.shell.state.files import Nonces
from gpu_node.shell.state.places import Places
from gpu_node.shell.transfer.upload import Uploader
from hypergpu.digest import digest_of
from hypergpu.refusal import RefusalError
from hypergpu.signature import IdentityKey
from hypergpu.units import Bytes, Samples
from tests.integration.node_service import NodeService, calls_to, places_in, served
from tests.unit.node.node_states import lease

CONTENT = np.random.default_rng(2).bytes(9 * CHUNK_BYTES + 5)
UPDATE = Update(digest_of(CONTENT), Bytes(len(CONTENT)), inner_steps=4, samples=Samples(32))
LEASE = lease()


class Desk:
    """A service, calls to it, and an update to send there."""

    def __init__(self, service: NodeService, calls: Calls, places: Places) -> None:
        self.service = service
        self.calls = calls
        self.places = places
        self.identity = IdentityKey.generate()
        self.path = places.update(LEASE.job_id, LEASE.round)
        self.path.parent.mkdir()
        self.path.write_bytes(CONTENT)
        self.uploader = Uploader(places, self.identity)
        self.uploader.made(LEASE)

    async def send(self, held: Lease = LEASE) -> None:
        await self.uploader.send(self.calls, held, UPDATE)


@pytest.fixture
async def desk(tmp_path: Path) -> AsyncIterator[Desk]:
    with places_in(tmp_path) as places:
        async with served() as there, calls_to(there.address) as calls:
            yield Desk(there.service, calls, places)


async def test_a_fresh_update_is_sent_from_its_start(desk: Desk) -> None:
    await desk.send()
    assert bytes(desk.service.stored) == CONTENT
    assert desk.service.offsets == [0]


async def test_a_broken_upload_goes_on_at_the_committed_offset(desk: Desk) -> None:
    desk.service.break_after_bytes = 3 * CHUNK_BYTES
    with pytest.raises(grpc.aio.AioRpcError):
        await desk.send()
    await desk.send()
    assert desk.service.offsets == [0, 3 * CHUNK_BYTES]
    assert bytes(desk.service.stored) == CONTENT


async def test_every_attempt_has_a_nonce_above_all_before_it(desk: Desk) -> None:
    desk.service.break_after_bytes = CHUNK_BYTES
    with pytest.raises(grpc.aio.AioRpcError):
        await desk.send()
    desk.service.accepted.clear()
    desk.uploader = Uploader(desk.places, desk.identity)  # the daemon was started again
    await desk.send()
    first, second = desk.service.nonces
    assert second > first


async def test_an_update_that_is_accepted_already_is_not_sent_again(desk: Desk) -> None:
    desk.service.accepted.add(UPDATE.digest)
    await Uploader(desk.places, desk.identity).send(desk.calls, LEASE, UPDATE)
    assert desk.service.offsets == []


async def test_a_missing_update_is_refused_before_anything_is_sent(desk: Desk) -> None:
    desk.path.unlink()
    with pytest.raises(RefusalError, match="FILE_UNUSABLE"):
        await desk.send()
    assert desk.service.nonces == []


async def test_an_update_damaged_on_disk_is_known_by_its_digest(desk: Desk) -> None:
    desk.path.write_bytes(b"x" + CONTENT[1:])
    with pytest.raises(RefusalError, match="damaged"):
        await desk.uploader.refuse_damaged(LEASE, UPDATE)


async def test_an_attempt_that_stored_more_than_the_last_has_progressed(desk: Desk) -> None:
    assert not desk.uploader.has_progressed
    desk.service.break_after_bytes = 2 * CHUNK_BYTES
    with pytest.raises(grpc.aio.AioRpcError):
        await desk.send()
    desk.service.break_after_bytes = 2 * CHUNK_BYTES
    with pytest.raises(grpc.aio.AioRpcError):
        await desk.send()
    assert desk.uploader.has_progressed


def test_nonces_only_grow_also_when_the_clock_goes_back(tmp_path: Path) -> None:
    with places_in(tmp_path) as places:
        far_ahead = 1 << 50
        places.nonce.write_text(str(far_ahead))
        first = [Nonces(places).take() for _ in range(2)]
        nonces = Nonces(places)
        second = [nonces.take() for _ in range(2000)]
    assert first[0] >= far_ahead
    assert first[1] > first[0]
    assert second == sorted(set(second))
    assert second[0] > first[1]

"""One update to the coordinator: signed, with a nonce of its own, from where the last try ended."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

from gpu_node.core.assignment import Lease, Update
from gpu_node.shell.link.bulk import CHUNK_BYTES, submitted
from gpu_node.shell.link.calls import Calls, transfer_timeout_s
from gpu_node.shell.state.files import Nonces
from gpu_node.shell.state.places import Places
from gpu_node.shell.translate import update_claim, update_header
from hypergpu.digest import digest_of_file
from hypergpu.refusal import Reason, RefusalError
from hypergpu.signature import IdentityKey
from hypergpu.units import Bytes
from hypergpu.v1 import node_pb2

_READ_BYTES = 4 * CHUNK_BYTES
_IN_FLIGHT_BYTES = 4 << 20
"""What the transport may have taken without any of it having arrived."""


class Uploader:
    """Sends updates and remembers how far each got."""

    def __init__(self, places: Places, identity: IdentityKey) -> None:
        self._places = places
        self._identity = identity
        self._nonces = Nonces(places)
        self._fresh: set[Lease] = set()
        self._committed: dict[Lease, int] = {}
        self._sent_bytes = 0
        self._gained_bytes = 0

    def made(self, lease: Lease) -> None:
        """An update was just made: the coordinator cannot hold any of it."""
        self._fresh.add(lease)
        self._committed.clear()

    @property
    def has_progressed(self) -> bool:
        """Whether the last attempts moved bytes that need not be sent again."""
        return self._sent_bytes > _IN_FLIGHT_BYTES or self._gained_bytes > 0

    async def send(self, calls: Calls, lease: Lease, update: Update) -> None:
        """Send what the coordinator does not hold yet; it is accepted when this returns.

        Raises:
            grpc.aio.AioRpcError: The call broke or was refused.
            RefusalError: FILE_UNUSABLE when the update is damaged on this disk, CALL_BROKEN when
                the coordinator ended the call early.
        """
        self._sent_bytes = self._gained_bytes = 0
        offset = await self._offset(calls, lease, update)
        if offset is None:
            return
        path = self._places.update(lease.job_id, lease.round)
        _refuse_other_size(path, update)
        nonce = await asyncio.to_thread(self._nonces.take)
        claim = update_claim(self._identity.node_id, lease, update, nonce)
        header = update_header(
            lease, update, nonce=nonce, offset=offset, signature=self._identity.sign(claim)
        )
        left = Bytes(update.size_bytes - offset)
        timeout_s = transfer_timeout_s(left, calls.timeout_ms)
        answer = await calls.submit(self._messages(header, path), timeout_s)
        if answer.committed_offset != update.size_bytes:
            detail = f"{answer.committed_offset} of {update.size_bytes} bytes arrived"
            raise RefusalError(Reason.CALL_BROKEN, detail)

    async def refuse_damaged(self, lease: Lease, update: Update) -> None:
        """After the coordinator found another digest: refuse what is damaged on this side.

        Raises:
            RefusalError: FILE_UNUSABLE.
        """
        path = self._places.update(lease.job_id, lease.round)
        if await asyncio.to_thread(digest_of_file, path) != update.digest:
            raise RefusalError(Reason.FILE_UNUSABLE, f"{path} is damaged on this node's disk")

    async def _offset(self, calls: Calls, lease: Lease, update: Update) -> int | None:
        """Where to go on; None when nothing is left to send."""
        if lease in self._fresh:
            self._fresh.discard(lease)
            return 0
        held = await calls.query_upload(lease, update.digest)
        if held.is_accepted:
            return None
        self._gained_bytes = held.committed_offset - self._committed.get(lease, 0)
        self._committed = {lease: held.committed_offset}
        return min(held.committed_offset, update.size_bytes)

    async def _messages(self, header: node_pb2.UpdateHeader, path: Path) -> AsyncIterator[bytes]:
        loop = asyncio.get_running_loop()
        offset = header.offset
        # Read while the header is judged, and each next block while one is on its way.
        ahead = loop.run_in_executor(None, _block, path, offset)
        try:
            yield node_pb2.SubmitUpdateRequest(header=header).SerializeToString()
            while block := await ahead:
                ahead = loop.run_in_executor(None, _block, path, offset + len(block))
                view = memoryview(block)
                for start in range(0, len(block), CHUNK_BYTES):
                    piece = view[start : start + CHUNK_BYTES]
                    yield submitted(offset + start, piece)
                    self._sent_bytes += piece.nbytes
                offset += len(block)
        finally:
            # A call that ended early asks for no more; what a read found out then is of no use.
            ahead.add_done_callback(lambda done: done.cancelled() or done.exception())


def _refuse_other_size(path: Path, update: Update) -> None:
    try:
        size_bytes = path.stat().st_size
    except OSError as broken:
        detail = f"the update {path}: {broken.strerror}"
        raise RefusalError(Reason.FILE_UNUSABLE, detail) from broken
    if size_bytes != update.size_bytes:
        detail = f"the update {path} has {size_bytes} bytes, not {update.size_bytes}"
        raise RefusalError(Reason.FILE_UNUSABLE, detail)


def _block(path: Path, offset: int) -> bytes:
    """The next bytes, none at the end. Opened for each, no file is left behind by a dead call."""
    with path.open("rb", buffering=0) as file:
        file.seek(offset)
        return file.read(_READ_BYTES)

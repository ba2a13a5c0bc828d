"""Sends the result of packed work: first the blob that it names, by a ticket, then its struct.

What has come of the blob need not be sent again.
"""

import asyncio
import stat
from pathlib import Path

from gpu_node.core.commands import SendResult
from gpu_node.shell.folder.state import StatePaths
from gpu_node.shell.link.calls import Calls
from hypergpu.assignment import Lease
from hypergpu.blobs import BlobRef
from hypergpu.errors import HyperGPUError, Reason
from hypergpu.line_limits import PIECE_BYTES, StallTimeout, transfer_timeout_s
from hypergpu.part_file import Span
from hypergpu.wire.bulk import FileRange


class ResultSending:
    """One attempt to send a result."""

    def __init__(self, calls: Calls, paths: StatePaths) -> None:
        self._calls = calls
        self._paths = paths
        self.has_progressed = False
        """Whether bytes were moved that need not be sent again."""

    async def run(self, command: SendResult) -> None:
        """Send it; it is accepted when this returns, and its file is deleted.

        Raises:
            grpc.aio.AioRpcError: A call broke or was rejected.
            BulkBrokenError: The bytes broke off.
            TimeoutError: They got nowhere.
            HyperGPUError: FILE_UNUSABLE, a file is not what the worker said.
        """
        lease = command.assignment.lease
        if (blob := command.blob) is None:
            await self._calls.contribute(lease, command.result)
            return
        path = self._paths.result(lease.job_id, blob.digest)
        check_result_file(path, blob)
        await self._send_blob(lease, blob, path)
        await self._calls.contribute(lease, command.result, blob)
        await asyncio.to_thread(path.unlink, missing_ok=True)

    async def _send_blob(self, lease: Lease, blob: BlobRef, path: Path) -> None:
        offer = await self._calls.offer_result(lease, blob)
        for ticket_range in offer.ticket.ranges:
            span = Span(ticket_range.start, ticket_range.end)
            timeout_ms = self._calls.timeout_ms
            stall = StallTimeout(PIECE_BYTES, timeout_ms)
            async with asyncio.timeout(transfer_timeout_s(span.end - span.start, timeout_ms)):
                await self._calls.bulk.send(
                    ticket_range, FileRange(path, span), stall, lambda _: None
                )
            self.has_progressed = True


def check_result_file(path: Path, blob: BlobRef) -> None:
    """Check that a blob of a result lies where the worker was to write it.

    Raises:
        HyperGPUError: FILE_UNUSABLE, it does not, or is no file, or has another size.
    """
    try:
        file_stat = path.lstat()
    except OSError as error:
        detail = f"the result {path}: {error.strerror}"
        raise HyperGPUError(Reason.FILE_UNUSABLE, detail) from error
    if not stat.S_ISREG(file_stat.st_mode):
        # The worker writes it, and might point it at another file of this node.
        raise HyperGPUError(Reason.FILE_UNUSABLE, f"the result {path} is no file")
    if file_stat.st_size != blob.size_bytes:
        detail = f"the result {path} has {file_stat.st_size} bytes, not {blob.size_bytes}"
        raise HyperGPUError(Reason.FILE_UNUSABLE, detail)

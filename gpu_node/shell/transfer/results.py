"""Sends the result of packed work: first the blob that it names, by a ticket, then its struct; a
small blob goes beside the struct.

What has come of the blob need not be sent again.
"""

import asyncio
import stat
from pathlib import Path
from typing import NamedTuple

from gpu_node.core.commands import SendResult
from gpu_node.shell.folder.receipts import ReceiptKeeper
from gpu_node.shell.folder.state import StatePaths
from gpu_node.shell.link.calls import Calls
from hypergpu.assignment import Lease
from hypergpu.blobs import BlobRef
from hypergpu.crypto import IdentityKey, sign
from hypergpu.errors import HyperGPUError, Reason
from hypergpu.ledger_terms import separator_of
from hypergpu.line_limits import PIECE_BYTES, StallTimeout, transfer_timeout_s
from hypergpu.part_file import Span
from hypergpu.result_statements import result_contribution, work_digest
from hypergpu.wire.bulk_ranges import FileRange


class ResultSigning(NamedTuple):
    """Signs results in the node's name, and keeps the terms under which it does."""

    identity: IdentityKey
    receipts: ReceiptKeeper

    def signature(self, command: SendResult) -> bytes:
        """The node's signature of a result; empty: its job has no terms, or it counts no work.

        Blocks on the disk where the job is new.

        Raises:
            HyperGPUError: REQUEST_INVALID, the job had other terms before.
            OSError: The disk fails.
        """
        assignment, blob, amount = command.assignment, command.blob, command.result.amount
        terms = assignment.terms
        if terms is None or blob is None or not amount.units:
            return b""
        self.receipts.agree(assignment.lease.job_id, terms)
        statement = result_contribution(
            terms,
            assignment.lease,
            self.identity.node_id,
            work_digest(assignment.work),
            blob,
            amount,
        )
        return sign(self.identity, separator_of(terms.domain), statement)


class ResultSending:
    """One attempt to send a result."""

    def __init__(self, calls: Calls, paths: StatePaths, signing: ResultSigning) -> None:
        self._calls = calls
        self._paths = paths
        self._signing = signing
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
        path = self._paths.result(lease, blob.digest)
        check_result_file(path, blob)
        signature = await asyncio.to_thread(self._signing.signature, command)
        content = b""
        if blob.size_bytes <= command.assignment.content_bytes_most:
            content = await asyncio.to_thread(path.read_bytes)
        else:
            await self._send_blob(lease, blob, path)
        await self._calls.contribute(lease, command.result, blob, signature, content)
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

"""Receipts and vouchers off the wire into the wallet. What is wrong is said and not kept."""

import asyncio
from collections.abc import Iterator

import structlog

from gpu_node.core.assignment import Assignment
from gpu_node.shell.state.places import Places
from gpu_node.shell.state.wallet import Wallet
from hypergpu.errors import HyperGPUError
from hypergpu.ids import JobId, NodeId
from hypergpu.v1 import receipt_pb2
from hypergpu.wire.ledger import receipt_message, receipt_value, terms_value, voucher_value

log = structlog.get_logger()

_SHOWN_MOST = 1_000
"""About 500 KB."""


class Earnings:
    """What the coordinator says that it owes. Nothing of it stops the work."""

    def __init__(self, places: Places, node: NodeId) -> None:
        """Read what is there. Blocks."""
        self._wallet = Wallet(places, node)
        self._node = node

    def held(self) -> Iterator[receipt_pb2.ReceiptsHeld]:
        """How many receipts the node has, for a hello; of the jobs at work last, the last too.

        One less of a job whose voucher is to come again, with its last receipt.
        """
        held = self._wallet.held()
        for place, job in enumerate(held, start=1):
            count = job.receipts - job.lacks_voucher
            message = receipt_pb2.ReceiptsHeld(job_id=job.job_id, count=count)
            if job.newest is not None and place > len(held) - _SHOWN_MOST:
                message.newest.CopyFrom(receipt_message(job.newest))
            yield message

    def changed_terms(self, assignment: Assignment) -> str:
        """Why no work is done for the terms of an assignment; empty: it is."""
        try:
            return self._wallet.changed_terms(assignment.lease.job_id, assignment.terms)
        except (HyperGPUError, OSError) as unreadable:
            return f"what is held of the job cannot be read: {unreadable}"

    async def agree(self, assignment: Assignment) -> None:
        """Remember the terms of work that is about to be sent.

        Raises:
            HyperGPUError: REQUEST_INVALID, the job's terms were others before.
            OSError: the disk fails.
        """
        await asyncio.to_thread(self._wallet.agree, assignment.lease.job_id, assignment.terms)

    async def receipts(self, message: receipt_pb2.Receipts) -> None:
        """Keep receipts, and the voucher that came with them; first the terms, if they are lost."""
        job_id = JobId(message.job_id)
        try:
            found = [receipt_value(each, self._node) for each in message.receipts]
            if found and message.HasField("terms"):
                terms = terms_value(message.terms)
                await asyncio.to_thread(self._wallet.agree_again, job_id, terms, found[0])
            await asyncio.to_thread(self._wallet.take, job_id, found)
        except (HyperGPUError, OSError, ValueError) as broken:
            log.warning("receipts were not kept", job_id=message.job_id[:80], reason=str(broken))
            return
        if message.HasField("voucher"):
            await self.voucher(job_id, message.voucher)

    async def voucher(self, job_id: JobId, message: receipt_pb2.Voucher) -> None:
        """Keep a voucher."""
        try:
            signed = voucher_value(message, self._node)
            await asyncio.to_thread(self._wallet.take_voucher, job_id, signed)
        except (HyperGPUError, OSError) as broken:
            log.warning("a voucher was not kept", job_id=job_id[:80], reason=str(broken))

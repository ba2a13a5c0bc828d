"""Receipts and vouchers off the wire into the wallet. What is wrong is said and not kept."""

import asyncio
from collections.abc import Iterable

import structlog

from gpu_node.core.assignment import Assignment
from gpu_node.shell.state.places import Places
from gpu_node.shell.state.wallet import Wallet
from hypergpu.ids import JobId, NodeId
from hypergpu.refusal import RefusalError
from hypergpu.v1 import receipt_pb2
from hypergpu.wire.ledger import receipt_value, voucher_value

log = structlog.get_logger()


class Earnings:
    """What the coordinator says that it owes. Nothing of it stops the work."""

    def __init__(self, places: Places, node: NodeId) -> None:
        """Read what is there. Blocks."""
        self._wallet = Wallet(places, node)
        self._node = node

    def held(self) -> Iterable[receipt_pb2.ReceiptsHeld]:
        """How many receipts the node has, for a hello."""
        return [
            receipt_pb2.ReceiptsHeld(job_id=job_id, count=count)
            for job_id, count in self._wallet.held().items()
        ]

    async def agree(self, assignment: Assignment) -> None:
        """Remember the terms of work that is about to be sent.

        Raises:
            OSError: the disk fails.
        """
        await asyncio.to_thread(self._wallet.agree, assignment.lease.job_id, assignment.terms)

    async def receipts(self, message: receipt_pb2.Receipts) -> None:
        """Keep receipts, and the voucher that came with them."""
        try:
            found = [receipt_value(each, self._node) for each in message.receipts]
            await asyncio.to_thread(self._wallet.take, JobId(message.job_id), found)
        except (RefusalError, OSError, ValueError) as broken:
            log.warning("receipts were not kept", job_id=message.job_id[:80], reason=str(broken))
            return
        if message.HasField("voucher"):
            await self.voucher(JobId(message.job_id), message.voucher)

    async def voucher(self, job_id: JobId, message: receipt_pb2.Voucher) -> None:
        """Keep a voucher."""
        try:
            signed = voucher_value(message, self._node)
            await asyncio.to_thread(self._wallet.take_voucher, job_id, signed)
        except (RefusalError, OSError) as broken:
            log.warning("a voucher was not kept", job_id=job_id[:80], reason=str(broken))

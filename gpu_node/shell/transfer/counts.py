"""Signs counts of the tokens that this node gave, whether or not it still has that work.

The coordinator counts what it passed on; the node's signature makes the count a statement of both,
under the terms that the node keeps. A count that could not be sent is asked for again when the node
dials in.
"""

import asyncio

import grpc
import structlog

from gpu_node.shell.folder.receipts import ReceiptKeeper
from gpu_node.shell.link.control import CoordinatorStream
from hypergpu.assignment import Lease
from hypergpu.crypto import IdentityKey, sign
from hypergpu.errors import HyperGPUError, Reason
from hypergpu.ids import JobId
from hypergpu.ledger_terms import Terms, separator_of
from hypergpu.packed_work import pack_work
from hypergpu.result_statements import CountStatement, count_contribution
from hypergpu.serving.serve_request import COUNT_KIND, SignedCount
from hypergpu.v1 import work_pb2
from hypergpu.wire.messages import digest_value, terms_value
from hypergpu.work_units import WorkUnit

log = structlog.get_logger()
_FAREWELL_S = 2.0
_SIGNED_UNITS = frozenset({WorkUnit.TOKENS, WorkUnit.LAYER_TOKENS})


class CountSigning:
    """Answers a coordinator that asks for signatures.

    Args:
        identity: The node's key.
        receipts: Keeps the terms of each job.
        stream: Brings counts, and has the calls that take signatures.
    """

    def __init__(
        self, identity: IdentityKey, receipts: ReceiptKeeper, stream: CoordinatorStream
    ) -> None:
        self._identity = identity
        self._receipts = receipts
        self._stream = stream
        self._tasks: set[asyncio.Task[None]] = set()
        stream.take_count = self.take

    def take(self, count: work_pb2.WorkCount) -> None:
        """Sign a count and send the signature; returns at once."""
        task = asyncio.create_task(self._answer(count), name="count")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _answer(self, count: work_pb2.WorkCount) -> None:
        try:
            terms, statement = count_value(count)
            signature = await asyncio.to_thread(self._signature, terms, statement)
            if self._stream.calls is not None:
                result = pack_work(COUNT_KIND, SignedCount(statement.units))
                await self._stream.calls.contribute(statement.lease, result, signature=signature)
        except (HyperGPUError, OSError, ValueError, grpc.aio.AioRpcError) as error:
            reason = str(error)[:300]
            log.warning("a count was not signed", job_id=count.job_id[:80], reason=reason)

    def _signature(self, terms: Terms, statement: CountStatement) -> bytes:
        """The node's signature. Blocks on the disk where the job is new."""
        self._receipts.agree(statement.lease.job_id, terms)
        contribution = count_contribution(terms, self._identity.node_id, statement)
        return sign(self._identity, separator_of(terms.domain), contribution)

    async def close(self) -> None:
        """Send what is under way, in a short time; the rest is asked for again."""
        tasks = tuple(self._tasks)
        if tasks:
            _, late_tasks = await asyncio.wait(tasks, timeout=_FAREWELL_S)
            for task in late_tasks:
                task.cancel()
            await asyncio.gather(*late_tasks, return_exceptions=True)


def count_value(message: work_pb2.WorkCount) -> tuple[Terms, CountStatement]:
    """A count off the wire, and what it is signed under.

    Raises:
        HyperGPUError: REQUEST_INVALID, a field is malformed, or the terms are another job's.
    """
    lease = Lease(JobId(message.job_id), message.number, message.lease)
    terms = terms_value(message.terms)
    if not terms.match(lease.job_id) or terms.unit not in _SIGNED_UNITS:
        detail = f"the terms are not those of {lease.job_id[:80]!r} in {terms.unit.value}"
        raise HyperGPUError(Reason.REQUEST_INVALID, detail)
    return terms, CountStatement(lease, message.units, digest_value(message.answers))

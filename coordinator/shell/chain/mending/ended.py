"""What failed because its job had ended on the ledger: nothing more of that job is recorded."""

from coordinator.core.settlement.epoch import Part
from coordinator.shell.chain.reading.ending import ending_of
from coordinator.shell.chain.site import LedgerSite
from coordinator.shell.journal.ledger.interface import Outbox
from coordinator.shell.journal.ledger.records import OutboxRow
from hypergpu.chain.moments import moment
from hypergpu.chain.rpc.answers import Block
from hypergpu.units import several


def ended_before(first: OutboxRow | None, site: LedgerSite, outbox: Outbox, head: Block) -> str:
    """Why a batch failed and is not to be signed again, in words; empty: for another reason.

    Args:
        first: Of what failed.
        site: The ledger.
        outbox: Of the journal.
        head: The newest block.

    Raises:
        RpcError: the chain cannot be asked.
    """
    if first is None or first.block is None or first.transaction.part != Part.BATCH.value:
        return ""
    job_id, nonce = first.transaction.job_id, first.transaction.nonce
    if job_id is None:
        return ""
    # The ledger's own window may not have been learned yet.
    site.check(head)
    ending = ending_of(job_id, site.job(job_id, head), site.window_s)
    if ending is None or not ending.is_over(head.time_s):
        return ""
    of_batch = [one.spans for one in outbox.batches(job_id, since=nonce) if one.nonce == nonce]
    receipts = sum(span.receipts for spans in of_batch for span in spans)
    return (
        f"{first.transaction.purpose} with {several(receipts, 'receipt')} was refused, since"
        f" {job_id} has ended on the ledger, on {moment(ending.recorded_until_s)}: it is given up,"
        " and other jobs are settled as ever"
    )

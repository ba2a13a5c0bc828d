"""Whether the journal is an older copy: nodes hold receipts that it does not know."""

from coordinator.core.job import Job
from hypergpu.ledger.receipt import SignedReceipt
from hypergpu.ledger.terms import separator_of
from hypergpu.ledger.typed import signer


def ahead_of_journal(job: Job, shown: SignedReceipt, kept: int) -> str:
    """Why the job cannot go on from this journal; empty: it can, or what is shown proves nothing.

    What went on from an older copy would put other receipts under numbers that are taken, which
    costs a coordinator its bond.

    Args:
        job: As the journal has it.
        shown: What a node holds.
        kept: How many receipts of that node the journal has, whose sequences begin at 0.
    """
    terms, receipt = job.terms, shown.receipt
    if terms is None or receipt.job != terms.job or receipt.sequence < kept:
        return ""
    if signer(separator_of(terms.domain), receipt, shown.signature) != terms.coordinator:
        return ""
    return (
        f"{receipt.node} holds receipt {receipt.sequence} of {job.job_id}, which this coordinator"
        f" signed, and the journal has {kept} of that node: it is an older copy, and what is signed"
        " from here on would contradict what nodes hold, which costs the bond. Stop the"
        " coordinator and start it with the newest journal; if there is none, stop the job"
    )

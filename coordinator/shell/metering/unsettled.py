"""What a coordinator without a chain says of jobs that a chain should settle."""

from collections.abc import Iterable

import structlog

from coordinator.core.job import ENDED, Job
from coordinator.shell.journal.ledger.interface import Outbox

log = structlog.get_logger()


def unsettled(jobs: Iterable[Job], outbox: Outbox) -> str:
    """Which jobs wait for their ledger, and what is to be done; empty: none does.

    Args:
        jobs: All that are there.
        outbox: Knows which of those that have ended are not settled.
    """
    on_their_way = {record.epoch.job_id for record in outbox.epochs()}
    named = [
        f"{job.job_id} (chain {job.terms.domain.chain_id})"
        for job in jobs
        if job.spec.pay.unit_price and job.terms is not None and job.terms.domain.chain_id
        if job.phase not in ENDED or job.job_id in on_their_way
    ]
    if not named:
        return ""
    said = (
        "no chain is named, and nothing is recorded or paid of what is signed for a ledger:"
        f" {', '.join(named)}; start with its chain: HYPERGPU_CHAIN=CHAIN"
    )
    log.warning("jobs are settled by nothing", reason=said)
    return said

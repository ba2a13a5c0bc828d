"""What a coordinator without a chain says of jobs that a chain should settle."""

from collections.abc import Iterable

import structlog

from coordinator.config import Settings
from coordinator.core.job import ENDED, Job
from coordinator.shell.journal.ledger.interface import Outbox

log = structlog.get_logger()


def unsettled(jobs: Iterable[Job], outbox: Outbox, settings: Settings) -> str:
    """Which jobs wait for their ledger, what is set in vain, and what is to be done; empty: none.

    Args:
        jobs: All that are there.
        outbox: Knows which of those that have ended are not settled.
        settings: Of the coordinator.
    """
    said = "; ".join(filter(None, (_in_vain(settings), _waiting(jobs, outbox))))
    if said:
        log.warning("something is settled by nothing", reason=said)
    return said


def _in_vain(settings: Settings) -> str:
    """Settings of a chain, where none is named."""
    values = {"CHAIN_URL": settings.chain_url, "LEDGER_CONTRACT": settings.ledger_contract}
    named = [f"HYPERGPU_COORDINATOR_{name}" for name, value in values.items() if value]
    if not named:
        return ""
    return (
        f"nothing is settled by {' and '.join(named)} alone, and what nodes earn is signed for no"
        " chain: name it too, HYPERGPU_CHAIN=CHAIN"
    )


def _waiting(jobs: Iterable[Job], outbox: Outbox) -> str:
    on_their_way = {record.epoch.job_id for record in outbox.epochs()}
    named = [
        f"{job.job_id} (chain {job.terms.domain.chain_id})"
        for job in jobs
        if job.spec.pay.unit_price and job.terms is not None and job.terms.domain.chain_id
        if job.phase not in ENDED or job.job_id in on_their_way
    ]
    if not named:
        return ""
    return (
        "no chain is named, and nothing is recorded or paid of what is signed for a ledger:"
        f" {', '.join(named)}; start with its chain: HYPERGPU_CHAIN=CHAIN"
    )

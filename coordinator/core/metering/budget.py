"""Whether a job's escrow covers the work that is about to be given out."""

from coordinator.core.job import Job
from coordinator.core.metering.accounts import owed_at_most
from hypergpu.ledger.pay import cost_at_most
from hypergpu.units import Samples, Wei


def uncovered(job: Job, samples: Samples) -> str:
    """Why a round of so many samples cannot be paid for; empty when it can."""
    price = Wei(job.spec.pay.unit_price)
    if not price:
        return ""
    owed, most = owed_at_most(job), cost_at_most(price, samples)
    escrow = job.spec.escrow
    if owed + most <= escrow:
        return _refused_by_ledger(job, most)
    return (
        f"the escrow of {escrow} does not cover the next round: up to {owed} is owed and the round"
        f" may cost {most}; raise it to {owed + most} at least, hypergpu job set"
        f" pay.escrow={owed + most}, and resume the job"
    )


def _refused_by_ledger(job: Job, most: Wei) -> str:
    """Why the ledger would not pay for work of this cost; empty: it would, or nobody knows."""
    says = job.ledger
    if says is None or says.closed:
        return says.closed if says is not None else ""
    if says.left is None or says.left + _rounding(job) >= most:
        return ""
    lacking = most - says.left
    return (
        f"the escrow of {job.job_id} has {says.left} left on the ledger (block {says.height}),"
        f" {lacking} less than the next round may cost; raise it, hypergpu job set"
        f" pay.escrow={job.spec.escrow + lacking}, and resume the job"
    )


def _rounding(job: Job) -> int:
    """What rounding may have left with the ledger: a unit for each node and epoch."""
    number = 0 if job.model is None else job.model.round
    return len(job.metering.accounts) * (2 + number // job.spec.pay.rounds_per_epoch)

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
        return ""
    return (
        f"the escrow of {escrow} does not cover the next round: up to {owed} is owed and the round"
        f" may cost {most}; raise it to {owed + most} at least, hypergpu job set"
        f" pay.escrow={owed + most}, and resume the job"
    )

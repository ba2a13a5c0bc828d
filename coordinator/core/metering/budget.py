"""Whether a job's escrow covers the work that is about to be given out, or is being done."""

from collections.abc import Container

from coordinator.core.job import Job, LedgerSays, Work
from coordinator.core.metering.accounts import owed_at_most
from coordinator.core.metering.judging import WAITING_MAX
from hypergpu.ledger.pay import cost_at_most
from hypergpu.units import Samples, Wei

_ANY = frozenset(Work)


def uncovered(job: Job, samples: Samples) -> str:
    """Why a round of so many samples cannot be paid for; empty when it can."""
    price = Wei(job.spec.pay.unit_price)
    if not price:
        return ""
    if job.ledger is not None and job.ledger.ending:
        return job.ledger.ending
    owed, most = owed_at_most(job), cost_at_most(price, samples)
    escrow = job.spec.escrow
    if owed + most <= escrow:
        return beyond_ledger(job, job.ledger, most)
    return (
        f"the escrow of {escrow} does not cover the next round: up to {owed} is owed and the round"
        f" may cost {most}; {_raising(job, owed + most + _later_cost(job, most))}"
    )


def beyond_ledger(job: Job, says: LedgerSays | None, most: Wei) -> str:
    """Why the ledger would not pay for work of a round; empty: it would, or nobody knows.

    Args:
        job: Whose round it is.
        says: What the ledger was last heard to say.
        most: What the work may cost.
    """
    if says is None or says.closed:
        return says.closed if says is not None else ""
    if says.left is None or says.left + _rounding(job) >= most:
        return ""
    lacking = most - says.left
    a_round = most if job.round is None else round_cost(job)
    return (
        f"the escrow of {job.job_id} has {says.left} left on the ledger (block {says.height}),"
        f" {lacking} less than the round may cost;"
        f" {_raising(job, job.spec.escrow + lacking + _later_cost(job, a_round))}"
    )


def round_cost(job: Job) -> Wei:
    """What the open round may cost at most, or the newest that was closed; 0 before the first."""
    return _cost(job, _ANY)


def coming_cost(job: Job) -> Wei:
    """What the updates that the open round still waits for may cost."""
    return _cost(job, _ANY - {Work.RECEIVED}) if job.round is not None else Wei(0)


def _raising(job: Job, escrow: int) -> str:
    return (
        f"raise it for all rounds that are left with as many nodes, hypergpu job set"
        f" pay.escrow={escrow}, and hypergpu job resume {job.job_id}"
    )


def _later_cost(job: Job, a_round: Wei) -> int:
    """What the rounds behind the next, or the open one, may cost, were they all like it."""
    spec, number = job.spec, 0 if job.model is None else job.model.round
    if spec.strategy == "aware":
        left = Samples(max(0, spec.most_samples - job.tally.samples))
        return max(0, cost_at_most(Wei(spec.pay.unit_price), left) - a_round)
    return max(0, spec.training.rounds - number - 1) * a_round


def _cost(job: Job, works: Container[Work]) -> Wei:
    round_ = job.round or job.closed
    parts = () if round_ is None else round_.participants.values()
    samples = sum(run.count for part in parts if part.work in works for run in part.shard.ranges)
    return cost_at_most(Wei(job.spec.pay.unit_price), Samples(samples))


def _rounding(job: Job) -> int:
    """What rounding may have left: a unit for each node, epoch, and round not measured yet."""
    number = 0 if job.model is None else job.model.round
    epochs = 1 + number // job.spec.pay.rounds_per_epoch
    return len(job.members) * (epochs + 1 + WAITING_MAX)

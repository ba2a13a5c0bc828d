"""When an epoch is over, and what it pays."""

from msgspec.structs import replace

from coordinator.core.commands import RecordPay
from coordinator.core.events import EpochEnded
from coordinator.core.job import EpochScores, Job, Metering
from coordinator.core.metering.accounts import account_of, vouched
from hypergpu.ledger import pay
from hypergpu.units import Wei


def ended(job: Job, *, is_over: bool) -> tuple[Job, tuple[RecordPay, ...]]:
    """End the epochs that the job has left and that have all their receipts.

    Args:
        job: With its newest receipts.
        is_over: No further round will come.
    """
    metering = job.metering
    unmeasured = {waiting.epoch for waiting in metering.unmeasured}
    present = _present(job)
    due = [each for each in metering.epochs if each.number < present or is_over]
    first_open = min(unmeasured, default=None)
    due = [each for each in due if first_open is None or each.number < first_open]
    is_last = is_over and not unmeasured
    if is_last and not due:
        due = [EpochScores(max(0, present), {})]
    records: list[RecordPay] = []
    for epoch in due:
        is_final = is_last and epoch is due[-1]
        record = _paid(job, epoch, is_last=is_final)
        job = replace(job, metering=_without(job.metering, record))
        job = vouched(job, tuple(record.rewards))
        records.append(RecordPay(record))
    return job, tuple(records)


def _present(job: Job) -> int:
    number = job.model.round if job.model is not None else 0
    return number // job.spec.pay.rounds_per_epoch


def _paid(job: Job, epoch: EpochScores, *, is_last: bool) -> EpochEnded:
    free = Wei(max(0, job.spec.escrow - job.metering.spent))
    total = sum(epoch.scores.values())
    pool = pay.pool(Wei(job.spec.pay.unit_price), total, free)
    return EpochEnded(
        at_ms=job.at_ms,
        epoch=epoch.number,
        is_last=is_last,
        scores=epoch.scores,
        pool=pool,
        rewards=pay.rewards(pool, epoch.scores),
    )


def _without(metering: Metering, record: EpochEnded) -> Metering:
    accounts = dict(metering.accounts)
    for node, reward in record.rewards.items():
        account = account_of(metering, node)
        accounts[node] = replace(account, earned=Wei(account.earned + reward))
    return replace(
        metering,
        accounts=accounts,
        epochs=tuple(each for each in metering.epochs if each.number != record.epoch),
        spent=Wei(metering.spent + sum(record.rewards.values())),
        is_over=record.is_last,
    )

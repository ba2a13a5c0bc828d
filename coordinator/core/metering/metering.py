"""What each step of the round machine means for receipts and pay.

Theory of operation. An accepted update is owed a receipt from the moment it is in. When its round
is folded, its quality is known but for what a judge finds on held-out data, which the round does
not wait for: such rounds are `unmeasured` until the judge has answered or was given up. Then all
of the round's receipts are made at once, each under its node's next number, and journalled with
the event that led to them, so that a replay gives the same ones and makes none twice. An epoch is
over when the job has left it and none of its rounds is unmeasured. What a job that ends has
accepted and never folds is measured by what is known of it.
"""

from msgspec.structs import replace

from coordinator.core.commands import Command, RecordPay
from coordinator.core.events import (
    Event,
    MeasuredUpdate,
    RoundMetered,
    UpdateReceived,
    UpdatesJudged,
)
from coordinator.core.job import (
    ENDED,
    DueReceipt,
    EpochScores,
    Job,
    Metering,
    Model,
    Phase,
    Round,
    UnmeasuredRound,
    Work,
)
from coordinator.core.metering.accounts import account_of, vouched
from coordinator.core.metering.contributions import contribution, epoch_of
from coordinator.core.metering.epochs import ended
from coordinator.core.metering.judging import chosen, judgements
from coordinator.core.metering.measuring import heard, qualities
from hypergpu.ids import NodeId
from hypergpu.ledger import pay
from hypergpu.ledger.terms import Terms
from hypergpu.units import Milliseconds

_OVER = ENDED | {Phase.FINISHING}


def folded(job: Job, agreements: dict[NodeId, float]) -> tuple[Job, tuple[Command, ...]]:
    """Measure the updates of the round that has just become a model, or have some judged first.

    Args:
        job: Which opens no round before this is known: what it owes is part of the next one's cost.
        agreements: See `AggregateReady.agreements`.
    """
    round_ = job.closed
    if job.terms is None or round_ is None or job.previous is None or job.model is None:
        return job, ()
    due = _due(job, round_, job.previous, agreements)
    judged = chosen(job, round_)
    number, epoch = round_.number, epoch_of(round_)
    waiting = UnmeasuredRound(number, epoch, job.previous.blob, job.model.blob, due, judged)
    if not judged:
        return _measured(job, waiting, None)
    metering = job.metering
    job = replace(job, metering=replace(metering, unmeasured=(*metering.unmeasured, waiting)))
    return job, (judgements(job)[-1],)


def metered(before: Job, event: Event, job: Job) -> tuple[Job, tuple[Command, ...]]:
    """Account for a step of the round machine; for a fold it has called `folded`.

    Args:
        before: The job without it.
        event: What happened, which was legal.
        job: The job as the round machine left it.

    Returns:
        The job with its accounts, and what is to be judged or written.
    """
    if job.terms is None or job.metering.is_over:
        return job, ()
    commands: tuple[Command, ...] = ()
    if isinstance(event, UpdateReceived):
        job = vouched(job, (event.node,))
    elif isinstance(event, UpdatesJudged):
        waiting = next(each for each in job.metering.unmeasured if each.number == event.round)
        job, commands = _measured(job, waiting, event)
    if job.phase in ENDED and before.phase not in ENDED:
        job, more = _left_open(job)
        commands += more
    job, ends = ended(job, is_over=job.phase in _OVER)
    return job, (*commands, *ends)


def _left_open(job: Job) -> tuple[Job, tuple[Command, ...]]:
    """The job ended within a round: what it accepted of that is never folded, and still owed."""
    round_, model = job.round, job.model
    if round_ is None or model is None:
        return job, ()
    due = _due(job, round_, model, {})
    number, epoch = round_.number, epoch_of(round_)
    return _measured(job, UnmeasuredRound(number, epoch, model.blob, model.blob, due, ()), None)


def _due(
    job: Job, round_: Round, base: Model, agreements: dict[NodeId, float]
) -> dict[NodeId, DueReceipt]:
    terms = job.terms or Terms()
    received = [
        (participant.slot, node, participant, participant.update)
        for node, participant in round_.participants.items()
        if participant.work is Work.RECEIVED and participant.update is not None
    ]
    return {
        node: DueReceipt(
            contribution=contribution(terms, round_, base.blob.digest, node, update),
            signature=update.signature,
            took_ms=participant.took_ms,
            allowed_ms=_allowed_ms(round_, participant.assigned_at_ms),
            agreement=agreements.get(node),
        )
        for _, node, participant, update in sorted(received, key=lambda each: each[:2])
    }


def _allowed_ms(round_: Round, assigned_at_ms: Milliseconds) -> Milliseconds:
    return Milliseconds(max(0, round_.deadline_at_ms - assigned_at_ms))


def _measured(
    job: Job, waiting: UnmeasuredRound, judged: UpdatesJudged | None
) -> tuple[Job, tuple[Command, ...]]:
    """Make a round's receipts."""
    metering = job.metering
    rest = tuple(each for each in metering.unmeasured if each.number != waiting.number)
    trials = heard(metering.trials, waiting, judged)
    metering = replace(metering, unmeasured=rest, trials=trials)
    if not waiting.due:
        return replace(job, metering=metering), ()
    found = qualities(waiting, judged, trials)
    updates = tuple(
        MeasuredUpdate(
            sequence=account_of(metering, node).receipts,
            quality_bps=found[node].bps,
            evaluator=found[node].evaluator,
            reason=found[node].reason,
            due=due,
        )
        for node, due in waiting.due.items()
    )
    record = RoundMetered(
        at_ms=job.at_ms, round=waiting.number, epoch=waiting.epoch, updates=updates
    )
    job = replace(job, metering=_with_receipts(metering, record))
    return vouched(job, tuple(waiting.due)), (RecordPay(record),)


def _with_receipts(metering: Metering, record: RoundMetered) -> Metering:
    accounts = dict(metering.accounts)
    before = next((each for each in metering.epochs if each.number == record.epoch), None)
    scores = dict(before.scores) if before is not None else {}
    for update in record.updates:
        signed = update.due.contribution
        account = account_of(metering, signed.node)
        accounts[signed.node] = replace(account, receipts=update.sequence + 1)
        score = pay.score(signed.samples, update.quality_bps)
        scores[signed.node] = scores.get(signed.node, 0) + score
    others = (each for each in metering.epochs if each.number != record.epoch)
    epochs = sorted((*others, EpochScores(record.epoch, scores)), key=lambda each: each.number)
    return replace(metering, accounts=accounts, epochs=tuple(epochs))

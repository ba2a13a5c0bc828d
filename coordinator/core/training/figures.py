"""The figures of a closed round, for people."""

from collections import Counter

from coordinator.core.training.job.events import AggregateReady, RoundRecorded
from coordinator.core.training.job.state import Job, Participant, Round
from coordinator.core.work.leases import WorkState
from hypergpu.units import Bytes, Milliseconds, Samples


def round_figures(job: Job, round_: Round, event: AggregateReady) -> RoundRecorded:
    """The record of a round whose updates are folded."""
    updates = [update for _, _, update in round_.accepted_updates]
    samples = sum(
        update.samples
        for node, part, update in round_.accepted_updates
        if part.repeats is None and not (node in round_.duplicates and round_.is_covered(node))
    )
    duration_ms = max(1, job.at_ms - round_.opened_at_ms)
    losses = [
        (update.loss_last, update.samples) for update in updates if update.loss_last is not None
    ]
    weight = sum(count for _, count in losses)
    return RoundRecorded(
        at_ms=job.at_ms,
        round=round_.number,
        participants=len(round_.participants) + _under_way(job, round_),
        updates=len(updates),
        samples=Samples(samples),
        bytes_up=Bytes(sum(update.blob.size_bytes for update in updates)),
        bytes_down=event.bytes_down,
        duration_ms=Milliseconds(duration_ms),
        loss=sum(loss * count for loss, count in losses) / weight if weight else None,
        samples_per_s=samples * 1000 / duration_ms,
        reason=job.reason,
        inner_steps=round_.inner_steps,
        codecs=dict(Counter(part.codec for part in round_.participants.values())),
        resting=len(round_.resting),
        forecast_error=_forecast_error(round_, _late(job, round_)),
        updates_needed=round_.updates_needed,
    )


def _late(job: Job, round_: Round) -> list[Participant]:
    """Those whom the round had waited for, and who go on after it."""
    return [
        each
        for each in job.long_leases.values()
        if each.base and each.base.round == round_.number and each.plan.rounds == 1
    ]


def _under_way(job: Job, round_: Round) -> int:
    """Leases that the round gave out and that go on after it."""
    base_rounds = (
        each.base.round for each in job.long_leases.values() if each.base and each.is_open
    )
    return sum(1 for number in base_rounds if number == round_.number)


def _forecast_error(round_: Round, late: list[Participant]) -> float | None:
    errors = [
        abs(part.plan.forecast_ms - took_ms) / took_ms
        for part in (*round_.participants.values(), *late)
        if part.plan.forecast_ms and (took_ms := _least_ms(round_, part))
    ]
    return sum(errors) / len(errors) if errors else None


def _least_ms(round_: Round, part: Participant) -> int:
    """Time that a participant took, or for one that was late the least that it would have taken, if
    that is beyond its forecast; 0: not known.
    """
    if (part.base is None and part.work is not WorkState.CUT) or part.took_ms:
        return part.took_ms
    least_ms = round_.deadline_at_ms - part.assigned_at_ms
    return least_ms if least_ms > part.plan.forecast_ms else 0

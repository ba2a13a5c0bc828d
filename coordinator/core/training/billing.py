"""The epoch that an update is billed in, which its node signs for.

It is the epoch of the round that folds the update. A round's own updates are in its epoch. Under a
lease over several rounds an epoch may close while the node works: its offer is then refused with
the epoch that is open, and the node signs again. A node that does not say which epoch it signs for
cannot do so: it signs for the one that its lease began in, and the ledger counts that in the first
one that is open.
"""

from coordinator.core.training.job.state import AcceptedUpdate, Job, Participant, Phase


def billing_epoch(job: Job, participant: Participant) -> int:
    """Number of the epoch that an update of the participant is billed in if it comes now."""
    if participant.base is None:
        return job.open_round.epoch
    # The round that is being folded takes no more updates: the next one does.
    number = job.newest_model.round + (job.active_phase is Phase.AGGREGATING)
    return number // job.spec.pay.rounds_per_epoch


def later_epoch(job: Job, participant: Participant, update: AcceptedUpdate) -> int | None:
    """Number of the epoch that the participant has to sign for instead, since the one that it has
    signed for is closed; None: it has not, or it cannot sign again.
    """
    if participant.base is None or update.epoch is None:
        return None
    now = billing_epoch(job, participant)
    return now if participant.base.epoch <= update.epoch < now else None


def epoch_rejection(job: Job, participant: Participant, update: AcceptedUpdate) -> str:
    """Why an update cannot be billed in the epoch that its node signed for; empty: it can."""
    if update.epoch is None or update.epoch == (now := billing_epoch(job, participant)):
        return ""
    return f"it is signed for epoch {update.epoch}, and epoch {now} is open"

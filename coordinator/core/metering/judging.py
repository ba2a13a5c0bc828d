"""Which updates of a round are measured on held-out data, and what is still to be measured."""

from blake3 import blake3

from coordinator.core.commands import JudgeUpdates
from coordinator.core.job import Job, JudgedUpdate, Participant, Round, Work
from hypergpu.ids import NodeId

WAITING_MAX = 2
"""A slow evaluator leaves rounds out rather than fall behind without end."""


def chosen(job: Job, round_: Round) -> tuple[JudgedUpdate, ...]:
    """The updates of a folded round that are judged; none where the job pays nothing.

    Whom they are from follows from the model that the round made, which nobody knew before they
    sent theirs.
    """
    count = round_.spec.pay.judged
    is_behind = len(job.metering.unmeasured) >= WAITING_MAX
    if not (round_.spec.pay.unit_price and count) or is_behind or job.model is None:
        return ()
    drawn = sorted(
        (_drawn(job.model.blob.digest, participant), node)
        for node, participant in round_.participants.items()
        if participant.work is Work.RECEIVED
    )
    return tuple(_judged(node, round_.participants[node]) for _, node in drawn[:count])


def judgements(job: Job) -> tuple[JudgeUpdates, ...]:
    """What of the job is to be judged."""
    return tuple(
        JudgeUpdates(
            round=waiting.number,
            base=waiting.base,
            made=waiting.made,
            updates=waiting.judged,
            spec=job.spec,
            manifest=job.manifest,
        )
        for waiting in job.metering.unmeasured
    )


def _drawn(model: str, participant: Participant) -> bytes:
    return blake3(f"judged/{model}/{participant.slot}".encode()).digest()


def _judged(node: NodeId, participant: Participant) -> JudgedUpdate:
    update = participant.update
    if update is None:
        raise AssertionError("a received update is there")
    return JudgedUpdate(node, update.blob, update.codec)

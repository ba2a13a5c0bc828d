"""Choice of the updates that a judge measures on held-out data."""

from blake3 import blake3

from coordinator.core.job.commands import JudgeUpdates
from coordinator.core.job.state import Job, JudgedUpdate, Participant, Round, WorkState
from hypergpu.ids import NodeId

JUDGING_MOST = 2
"""Rounds that wait for the judge. While so many do, further rounds are left unjudged."""


def draw_judged(job: Job, round_: Round) -> tuple[JudgedUpdate, ...]:
    """Updates of a folded round that are judged; none where the job pays nothing.

    The draw depends on the model that the round made, which nobody knew before the updates came.
    """
    count = round_.spec.pay.judged
    is_behind = sum(not waiting.is_ready for waiting in job.unmeasured) >= JUDGING_MOST
    if not (round_.spec.pay.unit_price and count) or is_behind or job.model is None:
        return ()
    drawn = sorted(
        (_lot(job.model.blob.digest, participant), node)
        for node, participant in round_.participants.items()
        if participant.work is WorkState.RECEIVED
    )
    return tuple(_judged_update(node, round_.participants[node]) for _, node in drawn[:count])


def judging_commands(job: Job) -> tuple[JudgeUpdates, ...]:
    """Commands for all rounds that wait for the judge."""
    return tuple(
        JudgeUpdates(
            round=waiting.number,
            base=waiting.base,
            made=waiting.made,
            updates=waiting.judged,
            spec=job.spec,
            manifest=job.manifest,
        )
        for waiting in job.unmeasured
        if not waiting.is_ready
    )


def _lot(model: str, participant: Participant) -> bytes:
    return blake3(f"judged/{model}/{participant.slot}".encode()).digest()


def _judged_update(node: NodeId, participant: Participant) -> JudgedUpdate:
    update = participant.update
    if update is None:
        raise AssertionError("a received update is there")
    return JudgedUpdate(node, update.blob, update.codec)

"""Rounds that hold up a faster node than all of those that they wait for.

A newcomer works under a lease over several rounds, which no round waits for. Where all the others
are slow, the open round may take far longer than the newcomer's work: it would be idle meanwhile.
Once its update has shown that the round would have been planned for it, and would have waited for
none of the others, the round closes with what is in; their leases go on.
"""

from coordinator.core.training.job.state import Job, Participant, Phase
from coordinator.core.training.long_leases import is_base_free
from coordinator.core.training.plan.decision import NodePlan
from coordinator.core.training.streams import shard_samples
from coordinator.core.training.waiting import waits_for_all
from hypergpu.ids import NodeId

_FASTER_TIMES = 4
"""Rounds wait for who does a quarter of the median node's work in them."""
_WORTH_TIMES = 2
"""A round that is over in about the time of the newcomer's update is not closed for it."""


def outrun_reason(job: Job, node: NodeId) -> str:
    """Why the open round closes now that the node's update is in, of a lease over several rounds
    that was given out in it; empty: it does not.
    """
    round_, long_lease = job.round, job.long_leases.get(node)
    if (
        round_ is None
        or long_lease is None
        or long_lease.base is None
        or job.phase is not Phase.TRAINING
    ):
        return ""
    is_planned = round_.spec.strategy == "aware" and not waits_for_all(round_.spec)
    pending_participants = round_.pending
    if (
        not is_planned
        or not pending_participants
        or long_lease.base.round != round_.number
        or not is_base_free(job)
    ):
        return ""
    left_ms = max(
        each.assigned_at_ms + each.plan.forecast_ms for each in pending_participants.values()
    )
    rates = [_stated_rate(job, each.plan) for each in round_.participants.values()]
    own = _shown_rate(long_lease)
    is_slow = all(0 < rate * _FASTER_TIMES < own for rate in rates)
    if not is_slow or sum(rates) > own or left_ms - job.at_ms < _WORTH_TIMES * long_lease.took_ms:
        return ""
    return f"{node} alone does {own / sum(rates):.0f} times what it waits for"


def _stated_rate(job: Job, plan: NodePlan) -> float:
    """Samples a second that a plan counts on while the node computes; 0: it was not measured."""
    batch = plan.batch(job.open_round.spec.training.batch_size)
    return batch * 1e6 / plan.step_us if plan.step_us else 0.0


def _shown_rate(participant: Participant) -> float:
    """Samples a second of a whole piece of work, with all that moved."""
    return shard_samples(participant.shard.ranges) * 1_000 / participant.took_ms

"""Who keeps up with a job: how long a round waits for whom, and who rests.

Theory of operation. A node that heartbeats and reports progress may never deliver: only updates
that are in speak for it. A round waits for *proven* members, each up to its own limit, which
follows from its forecast or from what its updates take. Everybody else is *on trial*: an update of
theirs counts like any other, and the round waits for it only while the job has patience, a small
share of its time. So however many silent nodes join, and whenever, they cost no more than that.

Whoever is over its limit is late: it counts for no quorum any more, and the round closes without it
once nobody else is awaited. Its shard goes back into the stream and out first in the next round.
While no update is in, nobody is late: all may be slow alike. A shard goes to an idle node then.

Where all updates are required (a quorum of 1), a round waits for every node that is not lost.

With fixed steps (``diloco``) and no stated deadline a slow node never costs more than it brings:
by what its updates take, a round waits for it only as far as more updates a second come of it.
"""

from collections.abc import Collection

from msgspec.structs import replace

from coordinator.core.training.job.state import Job, Member, Participant, Round
from coordinator.core.work.leases import OPEN_WORK, WorkState
from coordinator.core.work.standing import Standing
from coordinator.core.work.waiting import (
    FORECAST_TIMES,
    LEAST_MS,
    UNHEARD_MS,
    UNPLANNED_LEAST_MS,
    forecast_limit_ms,
    pace_limit_ms,
)
from hypergpu.ids import NodeId
from hypergpu.jobfile.spec import JobSpec
from hypergpu.units import Milliseconds, round_text, several

_QUORUM_TIMES = 2
"""A node of which nothing is known may be so many times slower than the quorum."""
_FEW_TIMES, _FEW_LEAST_MS = 16, 60_000
"""So many times slower than the only ones that are in; and no node of known pace more than that."""
_ARRIVALS_TIMES = 1.5
"""Where everybody is slower than usual, nobody is late before this many times the newest update."""
_PATIENCE_SHARE = 32
_PATIENCE_TIMES = 1.0
"""The first rounds may wait for so many times what their updates took."""
_AS_GOOD = 0.97
_SPARING_SHARE, _SPARING_TIMES = 64, 0.5
"""The same where rounds wait for nobody who costs more than their update."""


def waits_for_all(spec: JobSpec) -> bool:
    """Whether a round closes with every update that is not lost, and not without."""
    return spec.round.quorum >= 1


def forgoes_slow_nodes(spec: JobSpec) -> bool:
    """Whether a round goes on without nodes that cost it more time than their updates are worth.

    A plan gives slow nodes less work instead; and a deadline or a quorum of 1 is the user's word.
    """
    is_stated = bool(spec.round.deadline_ms) or waits_for_all(spec)
    return spec.strategy == "diloco" and not is_stated


def is_awaited(spec: JobSpec, standing: Standing) -> bool:
    """Whether a round waits for the member without calling on the job's patience.

    A deadline that the user states is their word for how long a newcomer may take.
    """
    if waits_for_all(spec) or standing.is_proven:
        return True
    is_newcomer = not (standing.pace_ms or standing.missed_in_a_row)
    return bool(spec.round.deadline_ms) and is_newcomer


def resting_members(job: Job, number: int) -> dict[NodeId, str]:
    """Members that get no shard in round ``number``, with the reason. Of those that can work none
    rests where nobody is proven: a job never rests with all its nodes.
    """
    present = {node: member for node, member in job.members.items() if member.is_present}
    exclusions = {node: each.exclusion for node, each in present.items() if each.exclusion}
    able = {node: member for node, member in present.items() if member.can_work}
    if waits_for_all(job.spec) or not any(each.standing.is_proven for each in able.values()):
        return exclusions
    return exclusions | {
        node: f"{_passed_over(member.standing)};"
        f" tries again in {round_text(member.standing.rests_until)}"
        for node, member in able.items()
        if member.standing.rests_until > number
    }


def members_on_trial(job: Job, nodes: Collection[NodeId]) -> frozenset[NodeId]:
    """Those of the participants that the round does not wait for; none where that leaves nobody."""
    awaited_nodes = {node for node in nodes if is_awaited(job.spec, job.members[node].standing)}
    return frozenset(nodes) - awaited_nodes if awaited_nodes else frozenset()


def _passed_over(standing: Standing) -> str:
    return f"no update in time, {several(standing.missed_in_a_row, 'round')} in a row"


def standing_reason(member: Member, participant: Participant) -> str:
    """Why the participant is less than awaited; empty where it is, or was never passed over."""
    standing = member.standing
    if participant.base is not None:
        return ""
    if participant.work is WorkState.LATE:
        return "late: the round goes on without its update"
    if participant.work is WorkState.ON_TRIAL and not standing.missed_in_a_row:
        return "on trial: no update of it has come in yet"
    if not standing.missed_in_a_row:
        return ""
    trial = "on trial: " if participant.work is WorkState.ON_TRIAL else ""
    return f"{trial}{_passed_over(standing)}"


def is_quorum_in(round_: Round) -> bool:
    """Whether enough updates are in to close the round at its deadline."""
    return round_.counts.get(WorkState.RECEIVED, 0) >= quorum(round_)


def quorum(round_: Round) -> int:
    """Updates that may close the round at its deadline. Nodes that are late or on trial do not
    count, one that is lost only as long as nobody has taken its shard over.
    """
    return round_.spec.round.updates_needed(assigned_shards(round_))


def assigned_shards(round_: Round) -> int:
    """Shards whose updates are in, awaited, or orphaned."""
    counts = round_.counts
    both = counts.get(WorkState.RECEIVED, 0) + counts.get(WorkState.PENDING, 0)
    return both + len(round_.orphans)


def late_at_ms(job: Job, node: NodeId) -> Milliseconds:
    """When an awaited participant is late in job time, as far as is known now: a later update of
    somebody else may put it off.
    """
    round_ = job.open_round
    participant = round_.participants[node]
    if not round_.longest_ms:
        return Milliseconds(participant.assigned_at_ms + UNHEARD_MS)
    if forgoes_slow_nodes(round_.spec):
        allowed_ms = _worthwhile_ms(job, node)
    else:
        allowed_ms = max(_ARRIVALS_TIMES * round_.longest_ms, _own_ms(job, node))
    at_ms = Milliseconds(participant.assigned_at_ms + int(allowed_ms))
    is_stated = round_.spec.round.deadline_ms > 0
    return max(at_ms, round_.deadline_at_ms) if is_stated else at_ms


def _worthwhile_ms(job: Job, node: NodeId) -> float:
    """How long a round that forgoes slow nodes waits for the participant.

    The round closes best when most updates a second are in, by the updates that are and by the
    others' pace. Whoever's pace is known to be slower than makes up for it is waited for no longer;
    an unknown one until one more update would just make up for it.
    """
    round_ = job.open_round
    times_ms = sorted(_expected_times_ms(job).values())
    rates = [count / max(1.0, time_ms) for count, time_ms in enumerate(times_ms, 1)]
    # Of what is as good, most updates.
    count = max(n for n, rate in enumerate(rates, 1) if rate >= _AS_GOOD * max(rates))
    best_ms = times_ms[count - 1]
    even_ms = best_ms * (count + 1) / count
    standing, participant = job.members[node].standing, round_.participants[node]
    pace_ms = standing.pace_for(participant.inner_steps)
    if not pace_ms and job.patience_ms is None and not is_quorum_in(round_):
        return _own_ms(job, node)
    if pace_ms > even_ms:
        return max(LEAST_MS, best_ms)
    usual_ms = max(_ARRIVALS_TIMES * round_.longest_ms, FORECAST_TIMES * pace_ms)
    return max(LEAST_MS, usual_ms if pace_ms else even_ms)


def _expected_times_ms(job: Job) -> dict[NodeId, float]:
    """What the updates of the open round take: those that are in, and of others the known."""
    times_ms = {}
    for node, participant in job.open_round.participants.items():
        pace_ms = job.members[node].standing.pace_for(participant.inner_steps)
        if participant.work is WorkState.RECEIVED:
            times_ms[node] = float(participant.took_ms)
        elif participant.work is WorkState.PENDING and pace_ms:
            times_ms[node] = float(max(pace_ms, job.open_round.longest_ms))
    return times_ms


def _own_ms(job: Job, node: NodeId) -> float:
    """By the participant's forecast; else by its pace, within what is known of all others."""
    round_, standing = job.open_round, job.members[node].standing
    participant = round_.participants[node]
    least_ms = LEAST_MS if round_.spec.strategy == "aware" else UNPLANNED_LEAST_MS
    if participant.plan.forecast_ms:
        return forecast_limit_ms(participant.plan.forecast_ms, least_ms)
    most_ms = max(_FEW_LEAST_MS, _FEW_TIMES * round_.longest_ms)
    if pace_limit := pace_limit_ms(standing, participant.inner_steps):
        return min(most_ms, pace_limit)
    if job.patience_ms is not None or is_quorum_in(round_):
        return max(least_ms, _QUORUM_TIMES * round_.longest_ms)
    return most_ms


def next_timer_ms(job: Job) -> Milliseconds:
    """When the open round has to look again who is late, or has its deadline; 0: never.

    Looks are some way apart, so that many nodes with limits of their own make few of them.
    """
    round_ = job.open_round
    moments = [] if round_.is_overdue or not round_.deadline_at_ms else [round_.deadline_at_ms]
    if not waits_for_all(round_.spec):
        open_states = (WorkState.PENDING,) if round_.longest_ms else OPEN_WORK
        soonest_ms = job.at_ms + (job.at_ms - round_.opened_at_ms) // _PATIENCE_SHARE
        moments += [
            max(Milliseconds(soonest_ms), late_at_ms(job, node))
            for node, participant in round_.participants.items()
            if participant.work in open_states
        ]
    return min(moments, default=Milliseconds(0))


def remaining_patience_ms(job: Job) -> Milliseconds:
    """How long later rounds may wait for nodes on trial, once the open one has closed."""
    round_ = job.open_round
    took_ms = round_.longest_ms
    share, times = _PATIENCE_SHARE, _PATIENCE_TIMES
    if forgoes_slow_nodes(round_.spec):
        share, times = _SPARING_SHARE, _SPARING_TIMES
    if job.patience_ms is None:
        left_ms = int((1 + times) * took_ms) - (job.at_ms - round_.opened_at_ms)
    elif round_.trial_until_ms:
        left_ms = round_.trial_until_ms - job.at_ms
    else:
        left_ms = job.patience_ms
    most_ms = _FEW_TIMES * took_ms
    return Milliseconds(min(most_ms, max(0, left_ms) + took_ms // share))


def standings_after(job: Job) -> dict[NodeId, Member]:
    """The members once the open round closes, which all miss that have no update in it. A round of
    ``aware`` is planned to close without some: its deadline alone speaks against nobody.
    """
    round_, members = job.open_round, dict(job.members)
    awaited_states = {WorkState.LATE}
    if round_.spec.strategy != "aware":
        awaited_states.add(WorkState.PENDING)
    for node, participant in round_.participants.items():
        standing = members[node].standing
        if participant.work in awaited_states:
            standing = standing.after_miss()
        elif participant.work in (WorkState.ON_TRIAL, WorkState.PASSED_OVER):
            standing = standing.after_trial(round_.number)
        members[node] = replace(members[node], standing=standing)
    return members

"""Who takes part, and for whom a round waits: for those who do at least a quarter of the middle
node's work in it. Everybody else works under a lease that no round waits for, however slow it is.
Only whose updates do not come at all rests for a while, and who could not begin at once.

And when a round closes without those who are late: at the moment that makes the most of it.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from msgspec.structs import replace

from coordinator.core.network.reading import NodeReading
from coordinator.core.network.work_forecast import FinishForecast
from coordinator.core.plan.batches import growth_after
from coordinator.core.plan.decision import NodeMemory, PlanRequest
from hypergpu.ids import NodeId
from hypergpu.units import Milliseconds, Samples

_AWAITED_FROM, _AWAITED_STILL_FROM = 0.25, 0.2
"""Share of the middle node's work that a node fits into a round: below the first no round waits for
it, and from the second on one that was waited for still is.
"""
_COMPUTING_FROM, _COMPUTING_STILL_FROM = 0.7, 0.6
"""The same of the share of a round that it computes: below, it moves bytes most of the time, and
does more where one move of bytes is for several rounds.
"""
_CUTS = 3
"""Rounds in a row that its update was missing from; a lease over several rounds counts for all."""
_REST_MOST = 32
_FORGOTTEN_AFTER = 64
"""Rounds of absence: who is back later begins like any other."""
_STARTING, _AWAY = "its worker is starting", "not connected"
_UNREADY = ("", _STARTING, _AWAY)
"""Why a node could not begin; the later in the row, the later it is asked back for the quorum."""


_USUAL_FROM, _USUAL_BELOW = 0.75, 1.25
"""Work that fits into a round over the median node's: between them it goes without saying."""


class PartOfMiddle(NamedTuple):
    """What a node does in a round."""

    of_middle: float
    """Full batches that fit into the round, over the middle node's; negative where moving bytes
    alone takes longer.
    """
    computing: float
    """Share of a round for which it would compute, over the middle node's."""
    is_measured: bool
    in_least: float = 0.0
    """What would fit into a round that takes as long as opening and closing it."""


class Participation(NamedTuple):
    """One node's part of the round and what the next plan is to remember of it."""

    memory: NodeMemory
    is_taking_part: bool
    reason: str = ""
    """Why it does more or less than the median node; empty where it does about as much."""
    is_awaited: bool = True
    """Whether the round is made long enough for it, and is not closed before."""


def candidate_memories(request: PlanRequest) -> dict[NodeId, NodeMemory]:
    """Memory of each candidate, the round before included: a process that begins anew
    is held to what its node did before, or one that crashes each time would be tried for ever.
    """
    return {node: replace(_after(request, node), away_rounds=0) for node in request.candidates}


def _unready(request: PlanRequest, readings: Mapping[NodeId, NodeReading]) -> dict[NodeId, str]:
    """Candidates that could not begin at once, with the reason."""
    known = {node: readings[node] for node in request.candidates if node in readings}
    return {
        node: _STARTING if reading.is_present else _AWAY
        for node, reading in known.items()
        if reading.is_starting or not reading.is_present
    }


def absentees(request: PlanRequest) -> dict[NodeId, NodeMemory]:
    """Memory of nodes that are away: how often they were of no use, for a while."""
    before = request.previous.nodes if request.previous is not None else {}
    away = dict.fromkeys((*before, *request.results))
    found = {}
    for node in away.keys() - request.candidates.keys():
        memory = _after(request, node)
        if node in request.under_way:
            found[node] = memory
        elif (memory.retries or memory.cut_rounds) and memory.away_rounds < _FORGOTTEN_AFTER:
            found[node] = replace(memory, away_rounds=memory.away_rounds + 1)
    return {node: found[node] for node in away if node in found}


def _after(request: PlanRequest, node: NodeId) -> NodeMemory:
    """The node's memory once the round before is counted, if it had a part in it: whether it was
    too late, gave its shard back or was lost, its update was not there.
    """
    before = request.previous.nodes if request.previous is not None else {}
    memory, result = before.get(node, NodeMemory(codec="")), request.results.get(node)
    if result is None:
        return memory
    stated = request.spec.training.batch_size
    growth = growth_after(memory.growth, result, stated, request.round)
    memory = replace(memory, growth=growth)
    if result.took_ms > 0:
        steps = result.plan.inner_steps * result.plan.batch(stated) / stated
        proven_us = 1000.0 * result.took_ms / steps
        return replace(memory, cut_rounds=0, proven_step_us=proven_us, proven_steps=steps)
    return replace(memory, cut_rounds=memory.cut_rounds + (_CUTS if result.is_lapsed else 1))


def still_resting(
    request: PlanRequest,
    memories: Mapping[NodeId, NodeMemory],
    readings: Mapping[NodeId, NodeReading],
) -> dict[NodeId, str]:
    """Who rests while nothing is measured, with the reason: the excluded, and those who could not
    begin. Who would be tried again first is asked back first for the quorum.
    """
    reasons = {n: _exclusion(m) for n, m in memories.items() if is_excluded(m, request.round)}
    unready = _unready(request, readings)
    reasons = {**unready, **reasons}

    def rank(node: NodeId) -> tuple[int, int, int]:
        until = memories[node].rests_until_round
        return -_unreadiness(unready, node), -until, request.candidates[node]

    spare = len(memories) - request.spec.round.updates_needed(len(memories))
    return {node: reasons[node] for node in sorted(reasons, key=rank)[:spare]}


def is_excluded(memory: NodeMemory, number: int) -> bool:
    """Whether the node's exclusion goes on in this round."""
    return memory.rests_until_round > number


def participations(
    request: PlanRequest,
    memories: Mapping[NodeId, NodeMemory],
    works: Mapping[NodeId, PartOfMiddle],
    readings: Mapping[NodeId, NodeReading],
) -> dict[NodeId, Participation]:
    """The part of each candidate: the only place that decides them.

    Args:
        request: What is planned.
        memories: Of each candidate, the round before included.
        works: What each of them does in a round.
        readings: They tell who could not begin at once.

    Returns:
        A part for each candidate. A round waits for at least one, and at least the job's quorum of
        the candidates takes part: of those who would rest who lost fewest updates is asked back,
        the unready last.
    """
    unready, found = _unready(request, readings), {}
    for node, memory in memories.items():
        if node in unready and not is_excluded(memory, request.round):
            found[node] = _resting(memory, unready[node])
        else:
            found[node] = _part(request, node, memory, works[node])
    missing = request.spec.round.updates_needed(len(found)) - sum(
        1 for part in found.values() if part.is_taking_part
    )
    resting = [node for node, part in found.items() if not part.is_taking_part]
    resting.sort(
        key=lambda node: (
            _unreadiness(unready, node),
            found[node].memory.retries,
            -works[node].of_middle,
            request.candidates[node],
        )
    )
    for node in resting[: max(0, missing)]:
        memory = replace(found[node].memory, rests_until_round=request.round)
        reason = f"{unready.get(node, 'its updates were missing')}, needed for the quorum"
        found[node] = Participation(memory, is_taking_part=True, reason=reason)
    return _with_one_awaited(request, works, found)


def _with_one_awaited(
    request: PlanRequest,
    works: Mapping[NodeId, PartOfMiddle],
    found: Mapping[NodeId, Participation],
) -> dict[NodeId, Participation]:
    """The same parts, of which one at least is waited for: the one that does most."""
    parts = {node: part for node, part in found.items() if part.is_taking_part}
    if any(part.is_awaited for part in parts.values()):
        return dict(found)
    most = max(parts, key=lambda node: (works[node].of_middle, -request.candidates[node]))
    return {**found, most: found[most]._replace(is_awaited=True)}


def _unreadiness(unready: Mapping[NodeId, str], node: NodeId) -> int:
    return _UNREADY.index(unready.get(node, ""))


def _part(
    request: PlanRequest, node: NodeId, memory: NodeMemory, work: PartOfMiddle
) -> Participation:
    number, is_tried = request.round, node in request.on_trial or bool(memory.retries)
    if is_excluded(memory, number):
        return _resting(memory, _exclusion(memory))
    if memory.cut_rounds >= (1 if memory.retries and node in request.results else _CUTS):
        return _resting_part(memory, number, f"no update in time, {memory.cut_rounds} in a row")
    share = max(0.0, work.of_middle)
    if is_tried and node in request.results and not memory.cut_rounds:
        memory, is_tried = replace(memory, retries=0), node in request.on_trial
    if is_tried or memory.cut_rounds or not work.is_measured:
        reason = (
            f"on trial after {_times(memory.retries)}"
            if memory.retries
            else "its last update is missing"
            if memory.cut_rounds
            else "nothing of its speed is known yet"
            if not work.is_measured
            else "no update of it has come in yet"
        )
        memory = replace(memory, is_awaited=False)
        return Participation(memory, True, f"{reason}; no round waits", is_awaited=False)
    least = _AWAITED_STILL_FROM if memory.is_awaited else _AWAITED_FROM
    computing = _COMPUTING_STILL_FROM if memory.is_awaited else _COMPUTING_FROM
    reason = f"{share:.2g} of the median node's work fits in"
    is_slow = max(share, work.in_least) < least
    if is_slow or work.computing < computing:
        if not is_slow:
            reason = "it would move bytes for most of a round"
        memory = replace(memory, is_awaited=False)
        return Participation(memory, True, f"{reason}; no round waits", is_awaited=False)
    is_usual = _USUAL_FROM <= work.of_middle < _USUAL_BELOW
    return Participation(replace(memory, is_awaited=True), True, "" if is_usual else reason)


def _resting_part(memory: NodeMemory, number: int, why: str) -> Participation:
    retries = memory.retries + 1
    until = number + min(_REST_MOST, 1 << retries)
    memory = replace(
        memory, rests_until_round=until, retries=retries, cut_rounds=0, is_awaited=False
    )
    return _resting(memory, f"excluded: {why}; tries again in round {until}")


def _exclusion(memory: NodeMemory) -> str:
    wait = f"excluded for the {_ordinal(memory.retries)} time in a row"
    return f"{wait}; tries again in round {memory.rests_until_round}"


def _resting(memory: NodeMemory, reason: str) -> Participation:
    return Participation(memory, False, reason)


def _times(count: int) -> str:
    return "an exclusion" if count == 1 else f"{count} exclusions"


def _ordinal(number: int) -> str:
    return {1: "1st", 2: "2nd", 3: "3rd"}.get(number, f"{number}th")


_LEAST_SPREAD = 0.04
"""No finish is known better than to a twenty-fifth."""
_LEAST_SPREAD_MS = 40
"""A busy machine's scheduler is worth that much."""
LEAST_MS = 1_000
"""No round closes without somebody sooner, however little there is to do: what is as good as
immediate is hardly ever later than this, on a busy machine too.
"""
_GRACE = 0.25
_MOMENTS = 64
"""Moments that are compared at most."""


class UpdateArrival(NamedTuple):
    """When an update is forecast to be in, after the round's opening."""

    mean_ms: Milliseconds
    spread_ms: Milliseconds
    samples: Samples

    @property
    def forecast(self) -> FinishForecast:
        """The same as `measure` has it, never more certain than anything is."""
        spread = max(self.spread_ms, int(_LEAST_SPREAD * self.mean_ms), _LEAST_SPREAD_MS)
        return FinishForecast(self.mean_ms, Milliseconds(spread))

    @property
    def late_ms(self) -> Milliseconds:
        """Nine of ten are in by then."""
        return self.forecast.quantile_ms(0.9)

    @property
    def safe_ms(self) -> Milliseconds:
        """Hardly ever later: what RFC 6298 makes a timer of, four mean deviations."""
        forecast = self.forecast
        return Milliseconds(forecast.mean_ms + 4 * forecast.deviation_ms)

    def chance_by(self, at_ms: int) -> float:
        """How likely it is in by then."""
        return self.forecast.chance_by(Milliseconds(at_ms))


def deadline(arrivals: Sequence[UpdateArrival], quorum: int) -> Milliseconds:
    """The deadline that makes the most samples a second, and some grace.

    It is never before the quorum is likely. The grace is what makes even the latest one safe, up
    to a quarter of the deadline: a round closes as soon as everybody is in, so it costs only when
    somebody is missing.

    Args:
        arrivals: One for each participant that was ever measured, at least one.
        quorum: Updates that have to be in, at least one.

    Returns:
        Time after the round's opening, more than 0.
    """
    late = sorted(arrival.late_ms for arrival in arrivals)
    needed = late[min(len(late), quorum) - 1]
    moments = sorted({arrival.mean_ms for arrival in arrivals} | set(late))
    moments = [moment for moment in moments[:: len(moments) // _MOMENTS + 1] if moment >= needed]
    best = max([needed, *moments], key=lambda at_ms: (_goodput(arrivals, at_ms), -at_ms))
    safe = max(arrival.safe_ms for arrival in arrivals)
    grace = min(max(0, safe - best), int(_GRACE * best))
    return Milliseconds(max(LEAST_MS, best + grace))


def _goodput(arrivals: Sequence[UpdateArrival], at_ms: int) -> float:
    """Samples a second that are expected if a round always closes then."""
    expected = sum(arrival.samples * arrival.chance_by(at_ms) for arrival in arrivals)
    return expected / max(1, at_ms)

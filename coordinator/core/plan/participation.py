"""Who takes part: everybody whom the others need not wait for, in every other round those whom they
would wait for a little, and from time to time those who were too late to be of use. Who could not
begin at once rests.

And when a round closes without those who are late: at the moment that makes the most of it.
"""

from collections.abc import Mapping, Sequence
from math import ceil
from typing import NamedTuple

from msgspec.structs import replace

from coordinator.core.measure.forecast import FinishForecast
from coordinator.core.measure.reading import NodeReading
from coordinator.core.plan.decision import Band, NodeMemory, PlanRequest
from hypergpu.ids import NodeId
from hypergpu.units import Milliseconds, Samples

_ALTERNATE_FROM, _FULL_FROM = 1.5, 1.25
"""Rounds' spans that a node takes at the least: every other round beyond the first, every round
again below the second.
"""
_EXCLUDED_FROM, _RETURN_FROM = 2.5, 2.0
_EXCLUDED_FROM_OWN_DATA = 6.0
"""What a node holds that no other does is worth a longer wait."""
_CUTS = 3
"""Rounds in a row without its update. A speed that has changed takes two to be believed."""
_REST_MOST = 32
_FORGOTTEN_AFTER = 64
"""Rounds of absence: who is back later begins like any other."""
_STARTING, _AWAY = "its worker is starting", "not connected"
_UNREADY = ("", _STARTING, _AWAY)
"""Why a node could not begin; the later in the row, the later it is asked back for the quorum."""


_LOW_BELOW, _HIGH_FROM = 0.75, 1.25
"""Work that fits into a round over the median node's."""


def work_band(work: float) -> Band:
    """Band of a node that takes part in every round.

    Args:
        work: Full batches that fit into the round, over the median node's.
    """
    if work < _LOW_BELOW:
        return Band.LOW
    return Band.HIGH if work >= _HIGH_FROM else Band.NORMAL


class Participation(NamedTuple):
    """One node's part of the round and what the next plan is to remember of it."""

    memory: NodeMemory
    is_taking_part: bool
    band: Band
    reason: str = ""
    """Why it is of that band; empty for a normal node."""
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
    away = dict.fromkeys(node for node in (*before, *request.results))
    found = {}
    for node in away.keys() - request.candidates.keys():
        memory = _after(request, node)
        if (memory.retries or memory.cut_rounds) and memory.away_rounds < _FORGOTTEN_AFTER:
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
    return replace(memory, cut_rounds=0 if result.took_ms > 0 else memory.cut_rounds + 1)


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

    spare = len(memories) - _nodes_needed(request, len(memories))
    return {node: reasons[node] for node in sorted(reasons, key=rank)[:spare]}


def is_excluded(memory: NodeMemory, number: int) -> bool:
    """Whether the node's exclusion goes on in this round."""
    return memory.rests_until_round > number


def participations(
    request: PlanRequest,
    memories: Mapping[NodeId, NodeMemory],
    least_spans: Mapping[NodeId, float],
    works: Mapping[NodeId, float],
    readings: Mapping[NodeId, NodeReading],
) -> dict[NodeId, Participation]:
    """The part and the band of each candidate: the only place that decides them.

    Args:
        request: What is planned.
        memories: Of each candidate, the round before included.
        least_spans: What each would take with the fewest steps, in spans of the round.
        works: Full batches that fit into the round for each, over the median node's.
        readings: They tell who could not begin at once.

    Returns:
        A part for each candidate. At least one takes part, and at least the job's quorum of the
        candidates: the fastest of those who would rest are asked back, the unready last.
    """
    unready, found = _unready(request, readings), {}
    for node, memory in memories.items():
        if node in unready and not is_excluded(memory, request.round):
            found[node] = _resting(memory, unready[node])
        else:
            found[node] = _part(request, node, memory, spans=least_spans[node], work=works[node])
    missing = _nodes_needed(request, len(found)) - sum(
        1 for part in found.values() if part.is_taking_part
    )
    resting = [node for node, part in found.items() if not part.is_taking_part]
    resting.sort(
        key=lambda node: (_unreadiness(unready, node), least_spans[node], request.candidates[node])
    )
    for node in resting[: max(0, missing)]:
        memory = replace(found[node].memory, rests_until_round=request.round)
        reason = f"{unready.get(node, 'slow')}, needed for the quorum"
        found[node] = Participation(memory, is_taking_part=True, band=Band.POOR, reason=reason)
    return found


def _unreadiness(unready: Mapping[NodeId, str], node: NodeId) -> int:
    return _UNREADY.index(unready.get(node, ""))


def _nodes_needed(request: PlanRequest, candidates: int) -> int:
    return max(1, ceil(request.spec.round.quorum * candidates - 1e-9))


def _part(
    request: PlanRequest, node: NodeId, memory: NodeMemory, *, spans: float, work: float
) -> Participation:
    number, is_fresh = request.round, node in request.results
    if is_excluded(memory, number):
        return _resting(memory, _exclusion(memory))
    if memory.retries and not is_fresh:
        reason = f"on trial after {_times(memory.retries)}"
        return Participation(memory, True, Band.POOR, reason, is_awaited=False)
    if memory.cut_rounds >= (1 if memory.retries else _CUTS):
        return _resting_part(memory, number, f"no update in time, {memory.cut_rounds} in a row")
    if spans > _excluded_from(request, memory):
        return _resting_part(memory, number, f"needs {spans:.1f} times as long as the round")
    if spans > (_FULL_FROM if memory.is_alternating else _ALTERNATE_FROM):
        memory = replace(memory, is_alternating=True, retries=0)
        reason = f"every other round: needs {spans:.1f} times as long as the round"
        if is_fresh:
            return _resting(memory, f"{reason}; takes part again in round {number + 1}")
        return Participation(memory, True, Band.POOR, reason)
    memory = replace(memory, is_alternating=False, retries=0)
    band = work_band(work)
    share = max(0.0, work)
    reason = "" if band is Band.NORMAL else f"{share:.2g} of the median node's work fits in"
    return Participation(memory, True, band, reason)


def _excluded_from(request: PlanRequest, memory: NodeMemory) -> float:
    if request.spec.data.sharding != "iid":
        return _EXCLUDED_FROM_OWN_DATA
    return _RETURN_FROM if memory.retries else _EXCLUDED_FROM


def _resting_part(memory: NodeMemory, number: int, why: str) -> Participation:
    retries = memory.retries + 1
    until = number + min(_REST_MOST, 1 << retries)
    memory = replace(
        memory, rests_until_round=until, retries=retries, cut_rounds=0, is_alternating=False
    )
    return _resting(memory, f"excluded: {why}; tries again in round {until}")


def _exclusion(memory: NodeMemory) -> str:
    wait = f"excluded for the {_ordinal(memory.retries)} time in a row"
    return f"{wait}; tries again in round {memory.rests_until_round}"


def _resting(memory: NodeMemory, reason: str) -> Participation:
    return Participation(memory, False, Band.POOR, reason)


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

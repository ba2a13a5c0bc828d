"""Who takes part, and for whom a round waits: for those who do at least a quarter of the middle
node's work in it. Everybody else works under a lease that no round waits for, however slow it is.
A node rests only for a while after its updates did not come at all, or where it could not begin at
once.
"""

from collections.abc import Mapping
from typing import NamedTuple

from msgspec.structs import replace

from coordinator.core.network.reading import NodeReading
from coordinator.core.training.plan.decision import NodeMemory, PlanRequest
from coordinator.core.training.plan.memories import EXCLUDING_CUTS, NodeMemories
from coordinator.core.training.plan.node_work import NodeWork
from coordinator.core.training.plan.prefetch import prefetch_limit
from coordinator.core.training.plan.round_shape import RoundShape
from coordinator.core.training.plan.speeds import RoundSpeeds
from hypergpu.ids import NodeId
from hypergpu.units import round_text

_LEAST_SPAN_US = 250_000
"""No node is too slow for a round of so little: opening and closing it take as long."""
_AWAITED_FROM, _AWAITED_STILL_FROM = 0.25, 0.2
"""Share of the middle node's work that a node fits into a round: below the first no round waits for
it, and from the second on one that was waited for still is.
"""
_COMPUTING_FROM, _COMPUTING_STILL_FROM = 0.7, 0.6
"""The same of the share of a round that it computes: below, it moves bytes most of the time, and
does more where one move of bytes is for several rounds.
"""
_REST_MOST = 32
_STARTING, _AWAY = "its worker is starting", "not connected"
_UNREADY = ("", _STARTING, _AWAY)
"""Why a node could not begin; the later in the row, the later it is asked back for the quorum."""
_USUAL_FROM, _USUAL_BELOW = 0.75, 1.25
"""Work that fits into a round over the median node's: between them it goes without saying."""


class PartOfMiddle(NamedTuple):
    """Work that a node does in a round, over the middle node's."""

    of_middle: float
    """Full batches that fit into the round, over the middle node's; negative where moving bytes
    alone takes longer.
    """
    computing: float
    """Share of a round for which it would compute, over the middle node's."""
    is_measured: bool
    in_least: float = 0.0
    """Work that would fit into a round that takes as long as opening and closing it."""


class Participation(NamedTuple):
    """One node's part of the round, and what the next plan is to remember of the node."""

    memory: NodeMemory
    is_taking_part: bool
    reason: str = ""
    """Why the node does more or less than the median node; empty where it does about as much."""
    is_awaited: bool = True
    """Whether the round is made long enough for the node, and is not closed before."""


def part_of_middle(speeds: RoundSpeeds, shape: RoundShape, work: NodeWork) -> PartOfMiddle:
    """Work that fits into a round, where the node begins the next one while bytes move, as far as
    the job lets it.
    """
    middle, step_us = shape.middle, work.speed.step_us
    middle_us = middle.inner_steps * step_us
    moved_us = work.moving_us + work.hidden_us
    ahead = prefetch_limit(speeds.request.spec, middle.inner_steps)
    moving_us = moved_us - min(moved_us, ahead * step_us)
    in_least = (max(_LEAST_SPAN_US, shape.span_us) - moving_us) / middle_us
    is_measured = bool(work.speed.reading.step_us.count)
    room_us = shape.span_us - moving_us
    computing_share = max(room_us, _LEAST_SPAN_US - moving_us) / max(1.0, middle.computing_us)
    return PartOfMiddle(room_us / middle_us, computing_share, is_measured, in_least)


def participations(
    request: PlanRequest,
    memories: NodeMemories,
    works: Mapping[NodeId, PartOfMiddle],
    readings: Mapping[NodeId, NodeReading],
) -> dict[NodeId, Participation]:
    """The part of each candidate: the only place that decides them.

    Args:
        request: What is planned.
        memories: Of the nodes, the round before included.
        works: What each candidate does in a round.
        readings: They tell which candidates could not begin at once.

    Returns:
        A part for each candidate. A round waits for at least one, and at least the job's quorum of
        the candidates takes part: of those who would rest the one that lost fewest updates is asked
        back first, the unready last.
    """
    unready, parts = _unready(readings), {}
    for node, memory in memories.candidates.items():
        if node in memories.excluded_nodes:
            parts[node] = _resting(memory, _exclusion(memory))
        elif node in unready:
            parts[node] = _resting(memory, unready[node])
        else:
            parts[node] = _part(request, node, memory, works[node])
    missing_count = request.spec.round.updates_needed(len(parts)) - sum(
        1 for part in parts.values() if part.is_taking_part
    )
    resting_nodes = [node for node, part in parts.items() if not part.is_taking_part]
    resting_nodes.sort(
        key=lambda node: (
            _unreadiness(unready, node),
            parts[node].memory.retries,
            -works[node].of_middle,
            request.candidates[node],
        )
    )
    for node in resting_nodes[: max(0, missing_count)]:
        memory = replace(parts[node].memory, rests_until_round=request.round)
        reason = f"{unready.get(node, 'its updates were missing')}, needed for the quorum"
        parts[node] = Participation(memory, is_taking_part=True, reason=reason)
    return _with_one_awaited(request, works, parts)


def _unready(readings: Mapping[NodeId, NodeReading]) -> dict[NodeId, str]:
    """Nodes that could not begin at once, with the reason."""
    return {
        node: _STARTING if reading.is_present else _AWAY
        for node, reading in readings.items()
        if reading.is_starting or not reading.is_present
    }


def _with_one_awaited(
    request: PlanRequest,
    works: Mapping[NodeId, PartOfMiddle],
    parts: Mapping[NodeId, Participation],
) -> dict[NodeId, Participation]:
    """The same parts, where the round waits for at least one: the node that does most."""
    taking_part = {node: part for node, part in parts.items() if part.is_taking_part}
    if any(part.is_awaited for part in taking_part.values()):
        return dict(parts)
    most = max(taking_part, key=lambda node: (works[node].of_middle, -request.candidates[node]))
    return {**parts, most: parts[most]._replace(is_awaited=True)}


def _unreadiness(unready: Mapping[NodeId, str], node: NodeId) -> int:
    return _UNREADY.index(unready.get(node, ""))


def _part(
    request: PlanRequest, node: NodeId, memory: NodeMemory, work: PartOfMiddle
) -> Participation:
    number, is_tried = request.round, node in request.on_trial or bool(memory.retries)
    if memory.cut_rounds >= (1 if memory.retries and node in request.results else EXCLUDING_CUTS):
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
    least_computing = _COMPUTING_STILL_FROM if memory.is_awaited else _COMPUTING_FROM
    reason = f"{share:.2g} of the median node's work fits in"
    is_slow = max(share, work.in_least) < least
    if is_slow or work.computing < least_computing:
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
    return _resting(memory, f"excluded: {why}; tries again in {round_text(until)}")


def _exclusion(memory: NodeMemory) -> str:
    wait = f"excluded for the {_ordinal(memory.retries)} time in a row"
    return f"{wait}; tries again in {round_text(memory.rests_until_round)}"


def _resting(memory: NodeMemory, reason: str) -> Participation:
    return Participation(memory, False, reason)


def _times(count: int) -> str:
    return "an exclusion" if count == 1 else f"{count} exclusions"


def _ordinal(number: int) -> str:
    return {1: "1st", 2: "2nd", 3: "3rd"}.get(number, f"{number}th")


def still_resting(
    request: PlanRequest, memories: NodeMemories, readings: Mapping[NodeId, NodeReading]
) -> dict[NodeId, str]:
    """Nodes that rest while nothing is measured, with the reason: the excluded, and those that
    could not begin. The node that would be tried again first is asked back first for the quorum.
    """
    candidates = memories.candidates
    unready = _unready(readings)
    reasons = {**unready, **{n: _exclusion(candidates[n]) for n in memories.excluded_nodes}}

    def rank(node: NodeId) -> tuple[int, int, int]:
        until = candidates[node].rests_until_round
        return -_unreadiness(unready, node), -until, request.candidates[node]

    spare = len(candidates) - request.spec.round.updates_needed(len(candidates))
    return {node: reasons[node] for node in sorted(reasons, key=rank)[:spare]}

"""Which experts of a mixture each member holds, in jobs whose nodes hold some of them only.

Experts are given in *windows*: sets of so many experts as a node holds, of which there are the
fewest that have each expert in two. So there are few different parts of a model, and the
coordinator makes each of them once a round, however many nodes hold it. The experts of a window lie
at unequal distances, so that many pairs of experts meet on some node: what never met learns nothing
of each other, and the whole model sends tokens to both.

A member keeps its window while it can: another one has to be fetched whole. A newcomer gets the
window with the most experts that nobody holds, then with the most that one alone holds. Where an
expert has lost its last holder, somebody moves, if that leaves fewer without.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import cache

from msgspec.structs import replace

from coordinator.core.training.job.state import Job, Member
from hypergpu.experts import Mixture
from hypergpu.ids import NodeId

ExpertSet = tuple[int, ...]
"""Numbers of experts, ascending; none: a whole replica."""


@cache
def expert_windows(mixture: Mixture) -> tuple[ExpertSet, ...]:
    """The sets of experts that nodes of a mixture may hold; none where they hold all."""
    if not mixture.is_partial:
        return ()
    experts, held_count = mixture.experts, mixture.held
    for count in range(-(-2 * experts // held_count), experts + 1):
        windows = tuple(
            _window(number * experts // count, mixture) for number in range(min(count, experts))
        )
        holders = Counter(expert for window in windows for expert in window)
        if len(holders) == experts and min(holders.values()) >= 2:
            return windows
    return tuple(_window(start, mixture) for start in range(experts))


def _window(start: int, mixture: Mixture) -> ExpertSet:
    """A window: distances from the start are 0, 1, 3, 6 and so on, and then what is left."""
    experts = mixture.experts
    unequal = [each * (each + 1) // 2 % experts for each in range(experts)]
    distances = list(dict.fromkeys([*unequal, *range(experts)]))[: mixture.held]
    return tuple(sorted((start + each) % experts for each in distances))


def give_experts(
    mixture: Mixture, held: Mapping[NodeId, ExpertSet], nodes: Sequence[NodeId]
) -> dict[NodeId, ExpertSet]:
    """The experts of each node.

    Args:
        mixture: Of the job; its nodes hold some of the experts only.
        held: What nodes have held so far.
        nodes: Those that are to hold some, in slot order.
    """
    windows = expert_windows(mixture)
    windows_by_node = {node: held[node] for node in nodes if held.get(node) in windows}
    for node in nodes:
        if node not in windows_by_node:
            windows_by_node[node] = _best_window(windows, windows_by_node.values())
    while nodes and (missing_experts := _missing(mixture, windows_by_node.values())):
        moves = ({**windows_by_node, node: window} for node in nodes for window in windows)
        best = min(moves, key=lambda move: len(_missing(mixture, move.values())))
        if len(_missing(mixture, best.values())) >= len(missing_experts):
            break
        windows_by_node = best
    return {node: windows_by_node[node] for node in nodes}


def _best_window(windows: Sequence[ExpertSet], held: Iterable[ExpertSet]) -> ExpertSet:
    holders = Counter(expert for window in held for expert in window)

    def worth(window: ExpertSet) -> tuple[int, int]:
        return sum(not holders[each] for each in window), sum(holders[each] == 1 for each in window)

    return max(windows, key=worth)


def _missing(mixture: Mixture, held: Iterable[ExpertSet]) -> set[int]:
    return set(range(mixture.experts)) - {expert for window in held for expert in window}


def with_experts(job: Job, nodes: Sequence[NodeId]) -> Job:
    """The job in which each of these nodes holds experts; unchanged where nodes hold all.

    Args:
        job: The job.
        nodes: Those that a round is about to open with, or that are given work in it.
    """
    if job.mixture is None or not job.mixture.is_partial:
        return job
    current_windows = {
        node: member.experts for node, member in job.members.items() if member.experts
    }
    wanted_nodes = sorted({*nodes, *_holders(job)}, key=lambda node: job.members[node].slot)
    windows_by_node = give_experts(job.mixture, current_windows, wanted_nodes)
    members: dict[NodeId, Member] = dict(job.members)
    for node in wanted_nodes:
        members[node] = replace(members[node], experts=windows_by_node[node])
    return replace(job, members=members)


def _holders(job: Job) -> list[NodeId]:
    """Members that are here and hold some already: what they hold need not be given to others."""
    return [node for node, each in job.members.items() if each.experts and each.is_present]


def experts_text(mixture: Mixture | None, experts: ExpertSet) -> str:
    """What a node is told of the experts that it holds; empty: it holds all."""
    if mixture is None or not experts:
        return ""
    numbers = ", ".join(map(str, experts))
    return f"experts {numbers} of {mixture.experts}"

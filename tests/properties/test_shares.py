"""Shares of nodes between jobs, over time: many plans one after the other, carried out as nodes
finish what they hold.
"""

from collections import Counter
from collections.abc import Mapping, Sequence

from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from coordinator.core.work.allocation import Lend, Recall, plan_allocation
from coordinator.core.work.demand import JobDemand, NodeOffer
from coordinator.core.work.job_turns import TURN_MS
from hypergpu.ids import JobId, NodeId, TokenId
from hypergpu.units import Milliseconds

STEP_MS = 10_000
"""Time between two plans, in which nodes finish what they hold."""
WORKLOADS = {"digits-softmax": 1}


def job(
    name: str, nodes_min: int = 1, owner: str = "", *, priority: int = 0, weight: int = 1
) -> JobDemand:
    return JobDemand(
        JobId(name),
        nodes_min,
        "digits-softmax",
        1,
        frozenset(),
        owner=TokenId(owner),
        priority=priority,
        weight=weight,
    )


class SharedNodes:
    """Nodes that jobs share: plans are carried out, and time passes."""

    def __init__(self, jobs: Sequence[JobDemand], count: int) -> None:
        self.jobs = {each.job_id: each for each in jobs}
        self.needs = {each.job_id: each.nodes_min for each in jobs}
        self.places: dict[NodeId, JobId | None] = {
            NodeId(f"node-{number:02}"): None for number in range(count)
        }
        self.leaving: set[NodeId] = set()
        self.now_ms = 0
        self.since: dict[JobId, tuple[bool, int]] = {}
        self.moves_count = 0
        self.served_ms: Counter[JobId] = Counter()

    def demands(self) -> list[JobDemand]:
        demand_list = []
        for each in self.jobs.values():
            members = frozenset(
                node
                for node, place in self.places.items()
                if place == each.job_id and node not in self.leaving
            )
            demand = replace(each, members=members, nodes_min=self.needs[each.job_id])
            is_served, at_ms = self.since.get(each.job_id, (None, 0))
            if is_served is not demand.is_served:
                at_ms = self.now_ms
                self.since[each.job_id] = (demand.is_served, at_ms)
            passed_ms = Milliseconds(self.now_ms - at_ms)
            demand_list.append(
                replace(demand, served_ms=passed_ms)
                if demand.is_served
                else replace(
                    demand, waited_ms=passed_ms, has_had_turn=each.job_id in self.served_ms
                )
            )
        return demand_list

    def step(self) -> int:
        """Plan once and carry it out; gives the number of moves."""
        offers = [NodeOffer(node, place, WORKLOADS) for node, place in self.places.items()]
        moves = plan_allocation(self.demands(), offers)
        for move in moves:
            if isinstance(move, Lend):
                self.places[move.node] = move.job_id
            else:
                assert isinstance(move, Recall)
                self.leaving.add(move.node)
        for each in self.demands():
            if each.is_served:
                self.served_ms[each.job_id] += STEP_MS
                # It has trained a round: from now on one node is enough for it.
                self.needs[each.job_id] = 1
        for node in self.leaving:
            self.places[node] = None
        self.leaving.clear()
        self.now_ms += STEP_MS
        self.moves_count += len(moves)
        return len(moves)

    def run(self, turns: int) -> None:
        for _ in range(turns * TURN_MS // STEP_MS):
            self.step()

    def shares(self) -> Mapping[JobId, int]:
        return Counter(place for place in self.places.values() if place is not None)


def test_a_job_that_needs_all_nodes_gets_them_from_one_that_trains_for_ever() -> None:
    nodes = SharedNodes([job("long")], 2)
    nodes.run(turns=3)
    nodes.jobs[JobId("late")] = job("late", 2)
    nodes.needs[JobId("late")] = 2
    for _ in range(4):
        nodes.step()
    assert nodes.served_ms[JobId("late")] > 0
    nodes.run(turns=2)
    assert nodes.shares() == {"long": 1, "late": 1}


def test_jobs_that_cannot_train_at_the_same_time_do_so_by_turns() -> None:
    nodes = SharedNodes([job("a"), job("b"), job("c")], 1)
    nodes.run(turns=30)
    served_times_ms = sorted(nodes.served_ms.values())
    assert len(served_times_ms) == 3
    assert served_times_ms[-1] < 1.5 * served_times_ms[0]


def test_an_owner_of_ten_jobs_takes_no_nodes_from_one_of_a_single_job() -> None:
    many = [job(f"many-{number}", owner="ada") for number in range(10)]
    nodes = SharedNodes([*many, job("single", owner="bob")], 8)
    nodes.run(turns=3)
    before = nodes.served_ms[JobId("single")]
    nodes.run(turns=10)
    assert nodes.served_ms[JobId("single")] - before == 10 * TURN_MS


def test_owners_take_turns_and_not_their_jobs() -> None:
    jobs = [job("one", owner="ada"), job("two", owner="ada"), job("own", owner="bob")]
    nodes = SharedNodes(jobs, 1)
    nodes.run(turns=40)
    assert 0.4 < nodes.served_ms[JobId("own")] / nodes.now_ms < 0.6


def test_what_is_left_is_shared_by_weight_and_evenly_among_owners() -> None:
    jobs = [job("one", weight=3, owner="ada"), job("two", owner="ada"), job("own", owner="bob")]
    nodes = SharedNodes(jobs, 16)
    nodes.run(turns=2)
    assert nodes.shares() == {"one": 6, "two": 2, "own": 8}


def test_the_higher_priority_of_an_owners_jobs_goes_first_and_ends_no_other_owners_turn() -> None:
    jobs = [job("low", owner="ada"), job("other", owner="bob")]
    nodes = SharedNodes(jobs, 2)
    nodes.step()
    nodes.jobs[JobId("high")] = job("high", owner="ada", priority=5)
    nodes.needs[JobId("high")] = 1
    nodes.run(turns=3)
    assert nodes.shares() == {"high": 1, "other": 1}


JOBS = st.lists(
    st.tuples(st.integers(1, 4), st.sampled_from("abc"), st.integers(1, 4)),
    min_size=1,
    max_size=8,
)


@settings(max_examples=60, deadline=None)
@given(jobs=JOBS, count=st.integers(1, 8))
def test_every_job_that_fits_gets_its_least_nodes_and_no_other_one_gets_any(
    jobs: list[tuple[int, str, int]], count: int
) -> None:
    demands = [
        job(f"job-{number}", least, owner, weight=weight)
        for number, (least, owner, weight) in enumerate(jobs)
    ]
    nodes = SharedNodes(demands, count)
    nodes.run(turns=3 * len(jobs) + 3)
    fitting_jobs = {each.job_id for each in demands if each.nodes_min <= count}
    assert set(nodes.served_ms) == fitting_jobs


@settings(max_examples=60, deadline=None)
@given(jobs=JOBS, count=st.integers(1, 8))
def test_nothing_moves_while_all_have_their_least_and_else_once_a_turn(
    jobs: list[tuple[int, str, int]], count: int
) -> None:
    demands = [
        job(f"job-{number}", least, owner, weight=weight)
        for number, (least, owner, weight) in enumerate(jobs)
    ]
    nodes = SharedNodes(demands, count)
    nodes.run(turns=3 * len(jobs) + 3)
    nodes.moves_count, turns = 0, 10
    nodes.run(turns=turns)
    served_demands = [each for each in nodes.demands() if each.is_served]
    fitting_demands = [each for each in demands if each.nodes_min <= count]
    if len(served_demands) == len(fitting_demands) <= count:
        assert nodes.moves_count == 0
    # A move is a node that is asked back or lent.
    assert nodes.moves_count <= 4 * count * (turns + 1)

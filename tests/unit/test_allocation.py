from coordinator.core.allocation import JobDemand, Lend, NodeOffer, Recall, plan_allocation
from hypergpu.ids import JobId, NodeId

WORKLOADS = {"digits-softmax": 1}


def demand(name: str, *members: str, nodes_min: int = 1, version: int = 1) -> JobDemand:
    nodes = frozenset(NodeId(member) for member in members)
    return JobDemand(JobId(name), nodes_min, "digits-softmax", version, nodes)


def offers(free: str, **held: str) -> list[NodeOffer]:
    """Free nodes as letters, held ones as job="letters"."""
    free_nodes = [NodeOffer(NodeId(letter), None, WORKLOADS) for letter in free]
    held_nodes = [
        NodeOffer(NodeId(letter), JobId(job), WORKLOADS)
        for job, letters in held.items()
        for letter in letters
    ]
    return free_nodes + held_nodes


def test_free_nodes_are_dealt_out_evenly() -> None:
    moves = plan_allocation([demand("one"), demand("two")], offers("abcd"))
    assert sorted(move.job_id for move in moves) == ["one", "one", "two", "two"]
    assert all(isinstance(move, Lend) for move in moves)


def test_a_job_that_cannot_start_gets_no_nodes() -> None:
    moves = plan_allocation([demand("big", nodes_min=3), demand("small")], offers("ab"))
    assert {move.job_id for move in moves} == {"small"}


def test_a_second_job_gets_its_share_back_from_the_first() -> None:
    moves = plan_allocation(
        [demand("one", "a", "b", "c", "d"), demand("two")], offers("", one="abcd")
    )
    assert [type(move) for move in moves] == [Recall, Recall]
    assert {move.job_id for move in moves} == {"one"}


def test_a_balanced_allocation_moves_nothing() -> None:
    demands = [demand("one", "a", "b"), demand("two", "c")]
    assert plan_allocation(demands, offers("", one="ab", two="c")) == ()


def test_a_node_without_the_workloads_version_is_not_lent() -> None:
    assert plan_allocation([demand("one", version=2)], offers("ab")) == ()


def test_nodes_of_a_paused_job_count_as_free() -> None:
    (move,) = plan_allocation([demand("two")], offers("", paused="a"))
    assert (move.node, move.job_id) == ("a", "two")


def test_a_newcomer_is_lent_while_members_are_away_for_a_moment() -> None:
    (move,) = plan_allocation([demand("one", "a", "b")], offers("c"))
    assert (move.node, move.job_id) == ("c", "one")


def test_a_started_job_is_not_starved_by_one_that_needs_more_to_start() -> None:
    demands = [demand("early", nodes_min=3), demand("late", "a", "b")]
    moves = plan_allocation(demands, offers("c", late="ab"))
    assert {move.job_id for move in moves} == {"late"}

"""The reason that a job which waits for nodes is told."""

from msgspec.structs import replace

from coordinator.core.work.demand import JobDemand, NodeOffer
from coordinator.core.work.outlook import job_outlooks
from hypergpu.ids import JobId, NodeId, TokenId
from hypergpu.units import Milliseconds

WORKLOADS = {"digits-softmax": 1}
TURN_MS = Milliseconds(60_000)


def job(name: str, nodes_min: int = 1, members: str = "") -> JobDemand:
    nodes = frozenset(NodeId(letter) for letter in members)
    return JobDemand(JobId(name), nodes_min, "digits-softmax", 1, nodes)


def offers(**letters: str) -> list[NodeOffer]:
    return [
        NodeOffer(NodeId(letter), JobId(name) if name != "free" else None, WORKLOADS)
        for name, node_letters in letters.items()
        for letter in node_letters
    ]


def test_nodes_that_fit_are_named_with_their_job_the_place_and_the_time() -> None:
    held_job = replace(job("long", members="ab"), served_ms=Milliseconds(10_000))
    waiting_jobs = [job("second", 2), job("third")]
    assert job_outlooks([held_job, *waiting_jobs], offers(long="ab"), Milliseconds(240_000)) == {
        "second": "2 nodes fit and train for long; place 1, about 4 min",
    } | {"third": "2 nodes fit and train for long; place 2, about 4 min"}


def test_after_a_turn_the_next_round_ends_the_wait() -> None:
    held_job = replace(job("long", members="a"), served_ms=TURN_MS)
    outlooks = job_outlooks([held_job, job("late")], offers(long="a"), TURN_MS)
    assert outlooks == {"late": "1 node fits and trains for long; place 1, once a round ends"}


def test_nodes_that_do_not_fit_are_said_with_the_reason_and_hold_no_place() -> None:
    other = NodeOffer(NodeId("b"), None, {"digits-cnn": 1})
    outlooks = job_outlooks([job("big", 2), job("late")], [*offers(free="a"), other], TURN_MS)
    assert outlooks == {
        "big": "1 of 2 nodes fit; another one does not: it does not offer digits-softmax 1"
    }


def test_a_job_behind_a_higher_priority_of_its_owner_is_told_so() -> None:
    high = replace(job("high", members="a"), priority=1, served_ms=TURN_MS)
    outlooks = job_outlooks([high, job("low")], offers(high="a"), TURN_MS)
    assert outlooks == {
        "low": "1 node fits and trains for high; place 1, after high, whose priority is higher"
    }


def test_jobs_of_many_owners_are_counted_and_one_is_named() -> None:
    held_jobs = [replace(job(name, members=name), served_ms=TURN_MS) for name in "ab"]
    late = replace(job("late", 2), owner=TokenId("bob"))
    free = offers(free="c")
    assert job_outlooks(
        [*held_jobs, job("other", members="d"), late],
        [*offers(a="a", b="b", other="d"), *free],
        TURN_MS,
    )[late.job_id] == (
        "4 nodes fit, and 3 of them train for a and 2 other jobs; place 1, once a round ends"
    )


def test_without_any_node_there_is_nothing_to_add() -> None:
    assert job_outlooks([job("one")], [], TURN_MS) == {}

"""A call goes where its first token is expected soonest."""

from coordinator.core.serving.routing import (
    QueuedCall,
    ReplicaLoad,
    choose_replica,
    next_pace_ms,
    next_read_pace_ms,
    queue_place,
)
from hypergpu.ids import NodeId
from hypergpu.units import Milliseconds
from tests.unit.job_states import ALICE, BOB


def load(node: NodeId, trip_ms: int, open_calls: int, pace_ms: float, most: int = 4) -> ReplicaLoad:
    return ReplicaLoad(node, Milliseconds(trip_ms), open_calls, most, pace_ms)


def test_a_far_fast_replica_is_chosen_over_a_near_slow_one() -> None:
    choice = choose_replica([load(ALICE, 5, 0, 400.0), load(BOB, 80, 0, 20.0)])
    assert choice.node == BOB
    assert "about 100 ms" in choice.reason


def test_calls_that_are_open_count_as_work_before_the_next() -> None:
    assert choose_replica([load(ALICE, 1, 3, 30.0), load(BOB, 60, 0, 30.0)]).node == BOB


def test_a_full_replica_gets_no_call_and_where_all_are_full_the_call_waits() -> None:
    full = load(ALICE, 1, 2, 1.0, most=2)
    assert choose_replica([full, load(BOB, 900, 0, 900.0)]).node == BOB
    choice = choose_replica([full])
    assert choice.node is None
    assert choice.reason == "1 replica answer 2 calls, their most"


def test_without_a_replica_the_reason_says_so() -> None:
    assert choose_replica([]) == (None, "no replica is ready")


def test_a_pace_is_of_one_call_however_many_share_the_device() -> None:
    assert next_pace_ms(0.0, 80.0, 4) == 20.0
    assert next_pace_ms(20.0, 30.0, 1) == 22.0


def test_a_replica_that_is_more_than_a_round_behind_answers_only_where_no_other_does() -> None:
    stale = load(ALICE, 1, 0, 1.0)._replace(rounds_behind=2)
    near = load(BOB, 500, 1, 90.0)._replace(rounds_behind=1)
    assert choose_replica([stale, near]).node == BOB
    full = near._replace(calls_most=1)
    assert choose_replica([stale, full]).node == ALICE


def test_a_replica_that_holds_the_prompt_is_chosen_until_its_queue_costs_more_than_reading() -> (
    None
):
    far = load(ALICE, 40, 1, 30.0)._replace(prompt_tokens=1_000, held_tokens=900)
    near = load(BOB, 5, 0, 30.0)._replace(prompt_tokens=1_000)
    choice = choose_replica([far, near])
    assert choice.node == ALICE
    assert choice.reason.endswith(
        "1 open call there, about 900 of 1000 prompt tokens are held there"
    )
    assert choose_replica([far._replace(unread_tokens=1_000), near]).node == BOB
    assert choose_replica([far, near._replace(ms_per_read_token=0.05)]).node == BOB


def test_reading_is_measured_by_prompts_that_are_long_enough() -> None:
    assert next_read_pace_ms(0.0, 400.0, 20, 1) == 0.0
    assert next_read_pace_ms(0.0, 400.0, 100, 2) == 2.0
    assert next_read_pace_ms(2.0, 700.0, 100, 1) == 3.0


def test_calls_of_higher_priority_go_first_and_none_before_one_that_has_begun() -> None:
    queue = [QueuedCall(0, True), QueuedCall(5, False), QueuedCall(0, False), QueuedCall(-1, False)]
    assert queue_place(queue, QueuedCall(-1, False)) == (
        4, "waited behind 2 calls of higher priority",
    )  # fmt: skip
    assert queue_place(queue, QueuedCall(0, False)) == (
        3,
        "waited before 1 call of lower priority and behind 1 call of higher priority",
    )
    assert queue_place(queue, QueuedCall(9, False)) == (
        1,
        "waited before 3 calls of lower priority",
    )
    assert queue_place(queue, QueuedCall(-9, True)) == (1, "")
    assert queue_place([], QueuedCall(3, False)) == (0, "")

"""The order in which evaluators answer requests of several jobs."""

from collections import Counter
from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from coordinator.core.hub.evaluator_turns import (
    EvaluatorJob,
    EvaluatorPlaces,
    EvaluatorTurn,
    OpenEvaluator,
    next_turn,
    owner_places,
    turn_reason,
)
from hypergpu.ids import JobId, TokenId

TWO = EvaluatorPlaces(2, 2)


def job(number: int, owner: str = "ada") -> EvaluatorJob:
    return EvaluatorJob(JobId(f"job-{number}"), TokenId(owner))


def busy(each: EvaluatorJob, used: int = 1) -> OpenEvaluator:
    return OpenEvaluator(each, is_busy=True, used=used)


def resting(each: EvaluatorJob, used: int = 1) -> OpenEvaluator:
    return OpenEvaluator(each, is_busy=False, used=used)


def test_a_job_goes_on_with_its_own_process() -> None:
    processes = [resting(job(1)), resting(job(2), used=2)]
    assert next_turn([job(2)], processes, {}, TWO) == EvaluatorTurn(job(2))


def test_the_process_that_rested_longest_makes_place() -> None:
    processes = [resting(job(1), used=7), resting(job(2), used=3)]
    assert next_turn([job(3)], processes, {}, TWO) == EvaluatorTurn(job(3), ended=JobId("job-2"))


def test_processes_that_take_little_rest_beside_those_that_work() -> None:
    processes, four = [resting(job(1)), resting(job(2)), resting(job(3))], EvaluatorPlaces(2, 4)
    assert next_turn([job(4)], processes, {}, four) == EvaluatorTurn(job(4))
    assert next_turn([job(2)], processes, {}, EvaluatorPlaces(2, 3)) == EvaluatorTurn(job(2))
    full = [*processes, resting(job(4), used=2)]
    assert next_turn([job(5)], full, {}, four) == EvaluatorTurn(job(5), ended=JobId("job-1"))


def test_a_process_that_rests_and_takes_much_makes_place_before_others_work() -> None:
    heavy = OpenEvaluator(job(1), is_busy=False, used=9, is_light=False)
    processes = [heavy, busy(job(2, "bob")), resting(job(3))]
    turn = next_turn([job(3)], processes, {}, EvaluatorPlaces(2, 8))
    assert turn == EvaluatorTurn(job(3), ended=JobId("job-1"))


def test_no_process_that_works_makes_place() -> None:
    assert next_turn([job(3, "bob")], [busy(job(1)), busy(job(2, "eve"))], {}, TWO) is None


def test_one_place_is_left_to_other_owners() -> None:
    waiting_jobs = [job(2), job(3), job(4, "bob")]
    assert next_turn(waiting_jobs, [busy(job(1))], {"ada": 1}, TWO) == EvaluatorTurn(job(4, "bob"))
    assert next_turn(waiting_jobs[:2], [busy(job(1))], {"ada": 1}, TWO) is None


def test_the_only_place_goes_to_any_owner() -> None:
    assert next_turn([job(1)], [], {}, EvaluatorPlaces(1, 1)) == EvaluatorTurn(job(1))


def test_a_job_that_waits_is_told_for_what_and_of_no_job_of_another_owner() -> None:
    processes, waiting_jobs = [busy(job(1)), busy(job(9, "bob"))], [job(2), job(3, "eve")]
    own = turn_reason(job(2), waiting_jobs, processes, TWO)
    assert own == "it waits for job-1: the jobs of one owner get 1 evaluator at once, of 2"
    other = turn_reason(job(3, "eve"), waiting_jobs, processes, TWO)
    assert other == "it waits for an evaluator: 2 of 2 are at work, and owners take turns"
    assert turn_reason(job(1), waiting_jobs, processes, TWO) == ""


def test_a_job_whose_own_request_is_answered_waits_for_no_other() -> None:
    assert turn_reason(job(1), [job(1)], [busy(job(1))], TWO) == ""


def turn_counts(owners: Sequence[str], places: int, turns_count: int) -> Counter[str]:
    """Turns of each owner, where every job asks again at once and each answer takes as long."""
    jobs = [job(number, owner) for number, owner in enumerate(owners)]
    turns: dict[str, int] = {}
    counts: Counter[str] = Counter()
    processes: dict[JobId, OpenEvaluator] = {}
    at_work: list[EvaluatorJob] = []
    for number in range(1, turns_count + 1):
        waiting_jobs = [each for each in jobs if each not in at_work]
        while (
            turn := next_turn(
                waiting_jobs, list(processes.values()), turns, EvaluatorPlaces(places, places)
            )
        ) is None:
            ended_job = at_work.pop(0)
            processes[ended_job.job_id] = resting(ended_job, processes[ended_job.job_id].used)
            waiting_jobs.append(ended_job)
        if turn.ended is not None:
            del processes[turn.ended]
        processes[turn.job.job_id] = busy(turn.job, number)
        turns[turn.job.owner] = turns[turn.job.job_id] = number
        counts[turn.job.owner] += 1
        at_work.append(turn.job)
        assert len(processes) <= places
        work_counts = Counter(each.owner for each in at_work)
        assert max(work_counts.values()) <= owner_places(places)
    return counts


@given(
    others=st.integers(1, 12),
    places=st.integers(2, 5),
)
def test_an_owner_of_many_jobs_gets_no_more_turns_than_one_of_a_single_job(
    others: int, places: int
) -> None:
    counts = turn_counts(["ada"] * others + ["bob"], places, 60)
    assert counts["bob"] >= 60 // (2 * places)


@given(owners=st.lists(st.sampled_from("abcd"), min_size=1, max_size=9), places=st.integers(1, 4))
def test_every_owner_is_turn_counts(owners: list[str], places: int) -> None:
    assert set(turn_counts(owners, places, 40)) == set(owners)

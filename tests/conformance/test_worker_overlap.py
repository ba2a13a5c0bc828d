"""Rounds that a worker begins early come out as if it had begun them when they opened."""

from collections.abc import Iterator
from typing import NamedTuple

import pytest

from gpu_node.shell.worker.protocol import AbortShard, ShardAborted, TrainShard
from hypergpu.assignment import Lease, Prefetch, SampleRange
from hypergpu.ids import JobId
from hypergpu.units import Samples
from tests.conformance.worker_process import (
    SUBJECTS,
    ShardKit,
    Subject,
    Worker,
    change,
    spawn_worker,
)

LEARNERS = (SUBJECTS[0], SUBJECTS[1], SUBJECTS[3])
BEGUN = 2


class Pair(NamedTuple):
    """Two workers. What one has begun early the other has not."""

    one: Worker
    other: Worker


@pytest.fixture(
    params=LEARNERS, ids=lambda subject: f"{subject.kind}:{subject.optimizer}", scope="module"
)
def subject(request: pytest.FixtureRequest) -> Subject:
    worker_subject: Subject = request.param
    return worker_subject


@pytest.fixture(scope="module")
def workers(subject: Subject) -> Iterator[Pair]:
    with spawn_worker(subject.kind) as one, spawn_worker(subject.kind) as other:
        yield Pair(one, other)


@pytest.fixture
def worker(workers: Pair) -> Worker:
    return workers.one


def beginning(kit: ShardKit, round: int) -> Prefetch:
    """The first inner steps of a round's shard."""
    start = kit.request(round).task.ranges[0].start
    ranges = (SampleRange(start, Samples(BEGUN * 16)),)
    return Prefetch(round, BEGUN, ranges, 1000 + round, Samples(64 * round), Samples(640))


def overlapping(kit: ShardKit, round: int, *, state: str = "state") -> TrainShard:
    """A round that was begun early, unless it is the first, and lets the next one be."""
    return change(
        kit.request(round, state=state),
        prefetched=beginning(kit, round) if round else None,
        prefetch=beginning(kit, round + 1),
    )


def update_begun_late(workers: Pair, kit: ShardKit, rounds: int) -> list[bytes]:
    """Each round by the worker that did not train the one before."""
    turns = [workers[round % 2] for round in range(rounds)]
    return [
        kit.update(worker, overlapping(kit, round, state="late"))
        for round, worker in enumerate(turns)
    ]


def test_what_was_begun_early_gives_the_update_that_beginning_late_gives(
    workers: Pair, kit: ShardKit
) -> None:
    early = [kit.update(workers.one, overlapping(kit, round)) for round in range(3)]
    assert early == update_begun_late(workers, kit, 3)


def test_a_round_that_was_begun_early_is_another_than_one_that_was_not(
    worker: Worker, kit: ShardKit
) -> None:
    kit.update(worker, overlapping(kit, 0))
    begun_update = kit.update(worker, overlapping(kit, 1))
    assert kit.update(worker, change(overlapping(kit, 1), prefetched=None)) != begun_update


def test_work_of_another_job_in_between_changes_nothing(workers: Pair, kit: ShardKit) -> None:
    worker = workers.one
    kit.update(worker, overlapping(kit, 0))
    other = Lease(JobId("job-000000000002"), 0, 7)
    others = change(kit.request(0, state="others"), lease=other)
    worker.train(change(others, update_path=str(kit.folder / "update-others")))
    assert kit.update(worker, overlapping(kit, 1)) == update_begun_late(workers, kit, 2)[1]


def test_drawing_a_model_in_between_changes_nothing(workers: Pair, kit: ShardKit) -> None:
    worker = workers.one
    kit.update(worker, overlapping(kit, 0))
    kit.initial_model(worker, 5)
    assert kit.update(worker, overlapping(kit, 1)) == update_begun_late(workers, kit, 2)[1]


def test_settings_that_changed_since_hold_for_what_was_begun(workers: Pair, kit: ShardKit) -> None:
    kit.update(workers.one, overlapping(kit, 0))
    slower = change(overlapping(kit, 1), learning_rate=1e-4)
    early = kit.update(workers.one, slower)
    assert kit.update(workers.other, slower) == early


def test_without_an_end_state_a_shard_is_trained_from_the_model(
    worker: Worker, kit: ShardKit
) -> None:
    nowhere = change(overlapping(kit, 1), resume_from=None)
    plain = change(kit.request(1, state="plain"), resume_from=None)
    assert kit.update(worker, nowhere) == kit.update(worker, plain)


def test_the_end_of_an_older_round_is_nothing_to_begin_from(worker: Worker, kit: ShardKit) -> None:
    for state in ("state", "plain"):
        kit.update(worker, overlapping(kit, 0, state=state))
    older = change(overlapping(kit, 2), resume_from=0)
    plain = change(overlapping(kit, 2, state="plain"), resume_from=0, prefetched=None)
    assert kit.update(worker, older) == kit.update(worker, plain)


def test_an_aborted_round_is_begun_again_from_the_same_end(workers: Pair, kit: ShardKit) -> None:
    worker = workers.one
    kit.update(worker, overlapping(kit, 0))
    endless = change(
        overlapping(kit, 1), inner_steps=100_000, ranges=(SampleRange(64, Samples(1_600_000)),)
    )
    worker.send(endless)
    worker.next_reply()
    worker.send(AbortShard(endless.lease))
    assert worker.answer() == ShardAborted(endless.lease)
    assert kit.update(worker, overlapping(kit, 1)) == update_begun_late(workers, kit, 2)[1]


def test_a_round_that_is_assigned_again_begins_where_it_did(worker: Worker, kit: ShardKit) -> None:
    kit.update(worker, overlapping(kit, 0))
    first = kit.update(worker, overlapping(kit, 1))
    assert kit.update(worker, overlapping(kit, 1)) == first


def test_an_idle_worker_that_begins_the_next_round_hears_what_it_is_told(
    worker: Worker, kit: ShardKit
) -> None:
    endless = SampleRange(64, Samples(16_000_000))
    ahead = Prefetch(1, 1_000_000, (endless,), 5, Samples(64), Samples(640))
    worker.train(change(overlapping(kit, 0), prefetch=ahead))
    begun_request = change(
        overlapping(kit, 1), inner_steps=1_000_000, ranges=(endless,), prefetched=ahead
    )
    worker.send(begun_request)
    worker.next_reply()
    worker.send(AbortShard(begun_request.lease))
    assert worker.answer() == ShardAborted(begun_request.lease)

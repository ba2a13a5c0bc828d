"""Rounds that a worker begins early come out as if it had begun them when they opened."""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from gpu_node.shell.worker.messages import Abort, Aborted, Ahead, PositionRange, Train
from hypergpu.ids import JobId
from hypergpu.units import Samples
from tests.conformance.worker_process import Desk, Subject, Worker, changed, spawned

LEARNERS = (
    Subject("torch", "digits-cnn", {"channels": 8}),
    Subject("numpy", "digits-softmax", {}),
)
BEGUN = 2


class Pair(NamedTuple):
    """Two workers. What one has begun early the other has not."""

    one: Worker
    other: Worker


@pytest.fixture(params=LEARNERS, ids=lambda subject: subject.kind, scope="module")
def subject(request: pytest.FixtureRequest) -> Subject:
    found: Subject = request.param
    return found


@pytest.fixture(scope="module")
def workers(subject: Subject) -> Iterator[Pair]:
    with spawned(subject.kind) as one, spawned(subject.kind) as other:
        yield Pair(one, other)


@pytest.fixture
def worker(workers: Pair) -> Worker:
    return workers.one


@pytest.fixture
def desk(tmp_path: Path, subject: Subject) -> Desk:
    return Desk(tmp_path, subject)


def beginning(desk: Desk, round: int) -> Ahead:
    """The first inner steps of a round's shard."""
    start = desk.request(round).ranges[0].start
    ranges = (PositionRange(start, Samples(BEGUN * 16)),)
    return Ahead(round, BEGUN, ranges, 1000 + round, Samples(64 * round), Samples(640))


def overlapping(desk: Desk, round: int, *, state: str = "state") -> Train:
    """A round that was begun early, unless it is the first, and lets the next one be."""
    return changed(
        desk.request(round, state=state),
        begun=beginning(desk, round) if round else None,
        ahead=beginning(desk, round + 1),
    )


def begun_late(workers: Pair, desk: Desk, rounds: int) -> list[bytes]:
    """Each round by the worker that did not train the one before."""
    turns = [workers[round % 2] for round in range(rounds)]
    return [
        desk.update(worker, overlapping(desk, round, state="late"))
        for round, worker in enumerate(turns)
    ]


def test_what_was_begun_early_gives_the_update_that_beginning_late_gives(
    workers: Pair, desk: Desk
) -> None:
    early = [desk.update(workers.one, overlapping(desk, round)) for round in range(3)]
    assert early == begun_late(workers, desk, 3)


def test_a_round_that_was_begun_early_is_another_than_one_that_was_not(
    worker: Worker, desk: Desk
) -> None:
    desk.update(worker, overlapping(desk, 0))
    begun = desk.update(worker, overlapping(desk, 1))
    assert desk.update(worker, changed(overlapping(desk, 1), begun=None)) != begun


def test_work_of_another_job_in_between_changes_nothing(workers: Pair, desk: Desk) -> None:
    worker = workers.one
    desk.update(worker, overlapping(desk, 0))
    others = changed(desk.request(0, state="others"), job_id=JobId("job-000000000002"), lease=7)
    worker.trained(changed(others, update_path=str(desk.folder / "update-others")))
    assert desk.update(worker, overlapping(desk, 1)) == begun_late(workers, desk, 2)[1]


def test_drawing_a_model_in_between_changes_nothing(workers: Pair, desk: Desk) -> None:
    worker = workers.one
    desk.update(worker, overlapping(desk, 0))
    desk.drawn(worker, 5)
    assert desk.update(worker, overlapping(desk, 1)) == begun_late(workers, desk, 2)[1]


def test_settings_that_changed_since_hold_for_what_was_begun(workers: Pair, desk: Desk) -> None:
    desk.update(workers.one, overlapping(desk, 0))
    slower = changed(overlapping(desk, 1), learning_rate=1e-4)
    early = desk.update(workers.one, slower)
    assert desk.update(workers.other, slower) == early


def test_without_an_end_state_a_shard_is_trained_from_the_model(worker: Worker, desk: Desk) -> None:
    nowhere = changed(overlapping(desk, 1), resume_from=None)
    plain = changed(desk.request(1, state="plain"), resume_from=None)
    assert desk.update(worker, nowhere) == desk.update(worker, plain)


def test_the_end_of_an_older_round_is_nothing_to_begin_from(worker: Worker, desk: Desk) -> None:
    for state in ("state", "plain"):
        desk.update(worker, overlapping(desk, 0, state=state))
    older = changed(overlapping(desk, 2), resume_from=0)
    plain = changed(overlapping(desk, 2, state="plain"), resume_from=0, begun=None)
    assert desk.update(worker, older) == desk.update(worker, plain)


def test_an_aborted_round_is_begun_again_from_the_same_end(workers: Pair, desk: Desk) -> None:
    worker = workers.one
    desk.update(worker, overlapping(desk, 0))
    endless = changed(
        overlapping(desk, 1), inner_steps=100_000, ranges=(PositionRange(64, Samples(1_600_000)),)
    )
    worker.say(endless)
    worker.next_reply()
    worker.say(Abort(endless.lease))
    assert worker.answer() == Aborted(endless.lease)
    assert desk.update(worker, overlapping(desk, 1)) == begun_late(workers, desk, 2)[1]


def test_a_round_that_is_assigned_again_begins_where_it_did(worker: Worker, desk: Desk) -> None:
    desk.update(worker, overlapping(desk, 0))
    first = desk.update(worker, overlapping(desk, 1))
    assert desk.update(worker, overlapping(desk, 1)) == first


def test_an_idle_worker_that_begins_the_next_round_hears_what_it_is_told(
    worker: Worker, desk: Desk
) -> None:
    endless = PositionRange(64, Samples(16_000_000))
    ahead = Ahead(1, 1_000_000, (endless,), 5, Samples(64), Samples(640))
    worker.trained(changed(overlapping(desk, 0), ahead=ahead))
    begun = changed(overlapping(desk, 1), inner_steps=1_000_000, ranges=(endless,), begun=ahead)
    worker.say(begun)
    worker.next_reply()
    worker.say(Abort(begun.lease))
    assert worker.answer() == Aborted(begun.lease)

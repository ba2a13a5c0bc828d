"""Step times out of what nodes say of their progress."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.core.network.observations import (
    STEP_TIMES,
    STEP_US_LEAST,
    STEP_US_MOST,
    add_observation,
)
from coordinator.core.network.progress import LEAST_MS, LeaseProgress, ProgressClock, advance_clock
from coordinator.core.network.reading import Estimate, NodeReading, StepTime
from hypergpu.ids import JobId
from hypergpu.units import Milliseconds

JOB = JobId("job-000000000001")


def message(at_ms: int, steps: float, lease: int = 1) -> LeaseProgress:
    return LeaseProgress(JOB, lease, steps, Milliseconds(at_ms))


def listen(*messages: LeaseProgress) -> list[StepTime]:
    """The steps that a clock times out of messages."""
    clock: ProgressClock | None = None
    step_times = []
    for each in messages:
        clock, step_time = advance_clock(clock, each)
        step_times += [step_time] if step_time is not None else []
    return step_times


def reading_after(times: list[StepTime]) -> NodeReading:
    reading = NodeReading()
    for step_time in times:
        reading = add_observation(reading, step_time)
    return reading


def test_steps_are_timed_from_the_first_one_on_without_what_surrounds_a_training() -> None:
    # Nine seconds until the first step is done, then one each half second.
    messages = [message(0, 0), *(message(9_000 + 500 * step, 1 + step) for step in range(9))]
    times = listen(*messages)
    assert len(times) == 4
    assert reading_after(times).step_us.mean == 500_000


def test_a_lease_that_never_ends_in_an_update_is_timed_all_the_same() -> None:
    times = listen(*(message(12_800 * step, step) for step in range(1, 5)))
    assert reading_after(times).step_us.mean == 12_800_000


@pytest.mark.parametrize(
    "messages",
    [
        [message(0, 4)],
        [message(0, 4), message(LEAST_MS - 1, 8)],
        [message(0, 4), message(5_000, 4)],
        [message(0, 4), message(5_000, 3)],
        [message(0, 4, lease=1), message(5_000, 8, lease=2)],
        [message(0, 0), message(5_000, 0), message(9_000, 8)],
    ],
)
def test_one_message_a_short_time_no_step_and_another_lease_time_nothing(
    messages: list[LeaseProgress],
) -> None:
    assert listen(*messages) == []


def test_steps_that_are_taken_again_begin_a_new_clock() -> None:
    times = listen(message(0, 5), message(2_000, 10), message(60_000, 1), message(62_000, 6))
    assert [(each.steps, each.took_ms) for each in times] == [(5, 2_000), (5, 2_000)]


def test_a_single_step_with_all_that_surrounds_it_is_forgotten_with_the_first_longer_work() -> None:
    first, longer = (
        StepTime(Milliseconds(0), 1, Milliseconds(150)),
        StepTime(Milliseconds(1), 20, Milliseconds(1_000)),
    )
    reading = reading_after([first, longer])
    assert reading.step_us.mean == 50_000
    assert reading.step_us.deviation <= 5_000
    # Once many steps were timed a single one is an observation like others.
    assert reading_after([longer, first]).step_us.mean == 100_000


@pytest.mark.parametrize("times", [64.0, 1 / 64])
def test_a_node_of_another_speed_is_known_after_few_messages(times: float) -> None:
    reading = reading_after([StepTime(Milliseconds(0), 10, Milliseconds(64_000))] * 8)
    changed_time = StepTime(Milliseconds(1), 10, Milliseconds(round(64_000 * times)))
    for _ in range(10):
        reading = add_observation(reading, changed_time)
    assert reading.step_us.mean == pytest.approx(6_400_000 * times, rel=0.05)


@given(
    st.floats(1e3, 1e9),
    st.lists(
        st.builds(
            StepTime,
            at_ms=st.integers(0, 1 << 40).map(Milliseconds),
            steps=st.floats(allow_nan=True, allow_infinity=True),
            took_ms=st.integers(-(1 << 63), 1 << 63).map(Milliseconds),
        ),
        max_size=12,
    ),
)
def test_no_observation_moves_the_time_of_a_step_by_more_than_a_stated_factor(
    mean_us: float, times: list[StepTime]
) -> None:
    reading, means = NodeReading(step_us=Estimate(mean_us, mean_us / 10, 5)), [mean_us]
    for step_time in times:
        reading = add_observation(reading, step_time)
        means.append(reading.step_us.mean)
    for before, after in pairwise(means):
        assert before / STEP_TIMES / 1.001 <= after <= before * STEP_TIMES * 1.001


@given(st.floats(), st.integers(-(1 << 63), 1 << 63))
def test_whatever_the_first_observation_says_a_step_takes_a_time_that_can_be_planned_with(
    steps: float, took_ms: int
) -> None:
    step_time = StepTime(Milliseconds(0), steps, Milliseconds(took_ms))
    step_us = add_observation(NodeReading(), step_time).step_us
    assert not step_us.count or STEP_US_LEAST <= step_us.mean <= STEP_US_MOST

"""The machine of a ring that trains, in virtual time: order, window, clipping and losses."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from benchmarks.ours.stages.virtual_training import (
    NoWork,
    StageLoss,
    StageTimes,
    VirtualTraining,
)
from coordinator.core.rings.training_ring import (
    AdapterStepped,
    AdapterTaken,
    BackwardDone,
    ForwardDone,
    LossMeasured,
    RingPlan,
    RoundFolded,
    RoundStored,
    SendForward,
    StageCame,
    StageWent,
    StoreRound,
    TakeRound,
    TrainingEvent,
    advance_training,
    new_ring,
    training_rejection,
    window_of,
)

PLAN = RingPlan(steps=6, micro_batches=5, round_steps=2, clip_norm=1.0)


class CountedWork(NoWork):
    """Counts what each stage has added up since the step before, and checks its order."""

    def __init__(self, stages: int) -> None:
        self.added: list[list[int]] = [[] for _ in range(stages)]
        self.scales: list[float] = []
        self.steps: list[list[int]] = [[] for _ in range(stages)]
        self.evaluated: dict[int, list[int]] = {}
        """Micro-batches that the last stage has evaluated, by the steps before them."""

    def take(self, stage: int, step: int) -> None:
        self.added[stage].clear()
        self.steps[stage] = list(range(step))

    def forward(self, stage: int, step: int, micro_batch: int) -> None:
        assert step == len(self.steps[stage])
        if stage == len(self.added) - 1:
            self.added[stage].append(micro_batch)

    def evaluate(self, stage: int, step: int, micro_batch: int) -> None:
        assert step == len(self.steps[stage])
        assert not self.added[stage]
        if stage == len(self.added) - 1:
            before = self.evaluated.get(step, []) if micro_batch else []
            self.evaluated[step] = [*before, micro_batch]

    def backward(self, stage: int, micro_batch: int) -> None:
        self.added[stage].append(micro_batch)

    def step(self, stage: int, step: int, scale: float) -> None:
        assert self.added[stage] == list(range(PLAN.micro_batches))
        self.added[stage].clear()
        self.steps[stage].append(step)
        self.scales.append(scale)


def test_stages_add_micro_batches_in_order_and_step_by_one_norm() -> None:
    work = CountedWork(3)
    driver = VirtualTraining(PLAN, [StageTimes(20.0, 20.0, 7.0)] * 3, 4, work)
    driver.run()
    assert work.steps == [list(range(PLAN.steps))] * 3
    assert driver.most_in_flight == 4
    # Stages give squares of 1, 2 and 3.
    assert set(work.scales) == {1.0 / (6**0.5 + 1e-6)}


@given(seed=st.integers(0, 10_000))
def test_lost_stages_change_nothing_of_what_is_added_up_and_evaluated(seed: int) -> None:
    draws = random.Random(seed)
    stages = draws.randrange(1, 5)
    work = CountedWork(stages)
    times = [
        StageTimes(draws.uniform(1, 30), draws.uniform(1, 30), draws.uniform(0, 20))
        for _ in range(stages)
    ]
    losses = [
        StageLoss(draws.uniform(0, 2_000), draws.randrange(stages), draws.uniform(0, 300))
        for _ in range(draws.randrange(4))
    ]
    plan = replace(PLAN, held_out_batches=draws.randrange(4))
    driver = VirtualTraining(plan, times, draws.randrange(1, 8), work, draws.uniform(0, 200))
    driver.run(losses)
    every = list(range(plan.held_out_batches))
    rounds = range(PLAN.round_steps, PLAN.steps + 1, PLAN.round_steps)
    assert work.evaluated == (dict.fromkeys(rounds, every) if every else {})
    assert work.steps == [list(range(PLAN.steps))] * stages
    assert driver.replayed_steps <= len(losses) * 2 * PLAN.round_steps


@given(st.integers(0, 10**6))
def test_a_ring_that_is_folded_with_others_evaluates_each_fold_once_whatever_stages_it_loses(
    seed: int,
) -> None:
    draws = random.Random(seed)
    work = CountedWork(2)
    plan = replace(PLAN, held_out_batches=draws.randrange(4), is_folded=True)
    losses = [
        StageLoss(draws.uniform(0, 2_500), draws.randrange(2), draws.uniform(0, 300))
        for _ in range(draws.randrange(5))
    ]
    times = [StageTimes(20.0, 20.0, 7.0)] * 2
    driver = VirtualTraining(plan, times, 3, work, draws.uniform(0, 400))
    driver.run(losses)
    every = list(range(plan.held_out_batches))
    rounds = list(range(PLAN.round_steps, PLAN.steps + 1, PLAN.round_steps))
    assert driver.measured_steps == (rounds if every else [])
    assert work.evaluated == (dict.fromkeys(rounds, every) if every else {})
    assert driver.ring.step == PLAN.steps


def test_a_ring_that_is_through_waits_for_the_fold_and_one_that_is_not_goes_on_from_it() -> None:
    plan = replace(PLAN, micro_batches=1, is_folded=True)
    ring = advance_training(new_ring(plan, 1), StageCame(0)).ring
    ring, commands = advance_training(ring, AdapterTaken(0, 1))
    assert commands == (SendForward(0, 0, 0, 1),)
    behind = advance_training(ring, RoundFolded(2))
    assert behind.commands == (TakeRound(0, 2, 2),)
    assert (behind.ring.step, behind.ring.epoch, behind.ring.admitted) == (2, 2, 0)
    for _ in range(plan.round_steps):
        ring, _ = advance_training(ring, BackwardDone(0, 0, 1, 1.0))
        ring, commands = advance_training(ring, AdapterStepped(0, 1))
    assert commands == (StoreRound(2, 1),)
    assert (ring.step, ring.stored_step) == (2, 0)
    assert advance_training(ring, RoundFolded(2)).commands == behind.commands
    assert "is not folded after 0" in training_rejection(ring, RoundFolded(0))
    assert "is not folded" in training_rejection(new_ring(PLAN, 1), RoundFolded(2))


def test_rows_that_are_held_out_go_forward_once_a_round_before_it_is_stored() -> None:
    plan, work = replace(PLAN, held_out_batches=3), CountedWork(2)
    driver = VirtualTraining(plan, [StageTimes(20.0, 20.0, 7.0)] * 2, 2, work)
    took_us = driver.run()
    assert work.evaluated == {step: [0, 1, 2] for step in (2, 4, 6)}
    alone_us = VirtualTraining(PLAN, [StageTimes(20.0, 20.0, 7.0)] * 2, 2).run()
    # Two go around at a time, a forward of 20 us in each stage, and four legs of 7.
    assert alone_us < took_us <= alone_us + 3 * (2 * (2 * 20.0 + 4 * 7.0))


def test_a_ring_goes_on_from_the_round_that_is_stored() -> None:
    ring = new_ring(PLAN, 1, stored_step=4)
    step = advance_training(ring, StageCame(0))
    assert step.commands == (TakeRound(0, 4, 1),)
    assert new_ring(PLAN, 1, stored_step=6).is_done


@pytest.mark.parametrize(
    ("event", "reason"),
    [
        (StageCame(0), "stage 0 is there already"),
        (StageCame(2), "the ring has no stage 2"),
        (StageWent(1), "stage 1 is not there"),
        (ForwardDone(0, 0, 9), "the ring is in epoch 1, not 9"),
        (ForwardDone(0, 0, 1), "micro-batch 0 is not under way"),
        (BackwardDone(0, 3, 1), "micro-batch 3 is not under way"),
        (LossMeasured(1, 0, 1), "micro-batch 0 is not under way"),
        (AdapterStepped(0, 1), "stage 0 has no step to take"),
        (RoundStored(2), "round of step 2 was not to be stored"),
    ],
)
def test_what_a_ring_does_not_wait_for_is_rejected_with_the_reason(
    event: TrainingEvent,
    reason: str,
) -> None:
    ring = advance_training(new_ring(PLAN, 2), StageCame(0)).ring
    assert training_rejection(ring, event) == reason
    assert advance_training(ring, event) == (ring, ())


def test_a_loss_alone_is_no_gradient_and_a_gradient_no_loss() -> None:
    ring = replace(new_ring(PLAN, 2), admitted=1)
    assert "rows of the micro-batch are not held out" in training_rejection(
        ring, LossMeasured(1, 0, 1)
    )
    ring = replace(ring, is_evaluating=True)
    assert "rows of the micro-batch are held out" in training_rejection(ring, BackwardDone(1, 0, 1))


def test_the_window_is_a_round_trip_with_room_for_what_waits() -> None:
    assert window_of([40.0] * 3, [0.0] * 3) == 6
    assert window_of([40.0] * 3, [15.0] * 3) == 11

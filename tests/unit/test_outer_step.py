"""The outer step that is chosen where a job states none, and the one that it states."""

import pytest
from msgspec.structs import replace

from coordinator.core.training.outer_step import outer_step
from coordinator.core.work.outer_step import PLAIN_STEP, OuterChoice
from hypergpu.jobfile.spec import MOMENTUM_MOST_OVERLAPPED, JobSpec, Outer, OuterSettings, RoundRule

SPEC = JobSpec("digits-cnn")


def choice_of(spec: JobSpec = SPEC, *, number: int = 10, nodes: int = 4) -> OuterChoice:
    return outer_step(spec, round_number=number, participants=nodes, is_sparse=False)


@pytest.mark.parametrize("number", [0, 10, 1000])
def test_one_node_takes_plain_steps(number: int) -> None:
    assert choice_of(number=number, nodes=1) == (PLAIN_STEP, "plain: one node takes part")


def test_momentum_grows_with_rounds_and_the_learning_rate_falls() -> None:
    assert choice_of(number=0).step == PLAIN_STEP
    assert choice_of(number=10).step.momentum == pytest.approx(0.45)
    late = choice_of(number=100_000).step
    assert (late.learning_rate, late.momentum) == pytest.approx((0.7, 0.9), abs=1e-3)


@pytest.mark.parametrize(
    ("stated", "step"),
    [
        (OuterSettings(0.5, 0.1), Outer(0.5, 0.1)),
        (OuterSettings(momentum=0.0), Outer(0.7, 0.0)),
        (OuterSettings(learning_rate=1.0), Outer(1.0, 0.9)),
    ],
)
@pytest.mark.parametrize("nodes", [1, 8])
def test_stated_settings_hold_whoever_takes_part(
    stated: OuterSettings, step: Outer, nodes: int
) -> None:
    spec = replace(SPEC, outer=stated)
    assert choice_of(spec, number=0, nodes=nodes) == (step, "as the job states")


def test_rounds_that_overlap_stay_below_the_momentum_that_they_bear() -> None:
    spec = replace(SPEC, round=RoundRule(overlap="eager"))
    assert choice_of(spec, number=100_000).step.momentum <= MOMENTUM_MOST_OVERLAPPED


def test_sparse_rounds_take_plain_steps_whatever_is_stated() -> None:
    spec = replace(SPEC, outer=OuterSettings(0.7, 0.9))
    choice = outer_step(spec, round_number=3, participants=4, is_sparse=True)
    assert choice.step == PLAIN_STEP

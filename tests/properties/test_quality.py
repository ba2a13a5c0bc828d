"""The quality rule: bounded, fair to whom chance draws, and blind to what a node says."""

import math
import random
from collections.abc import Sequence
from statistics import fmean

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from coordinator.core.job.state import Trial
from coordinator.core.quality import (
    JUDGED_LEAST,
    TRIALS_KEPT,
    UpdateFindings,
    judged_trial,
    quality_of,
    worth_from_trials,
)
from hypergpu.ids import NodeId
from hypergpu.units import Milliseconds

anything = st.one_of(st.none(), st.floats())
figures = st.one_of(st.none(), st.floats(-1e6, 1e6))
times = st.integers(0, 10**9).map(Milliseconds)
OFTEN, SELDOM, NEVER, FREE = (NodeId(f"0x{number:040x}") for number in range(4))
parts_found = st.floats(0, 5, allow_subnormal=False)
RANDOM_TRIALS = 10_000


def measured_by(numbers: st.SearchStrategy[float | None]) -> st.SearchStrategy[UpdateFindings]:
    return st.builds(
        UpdateFindings,
        agreement=numbers,
        typical_agreement=numbers,
        worth=numbers,
        is_round_idle=st.booleans(),
        took_ms=times,
        allowed_ms=times,
    )


def trials_of(nodes: Sequence[NodeId], parts: Sequence[float]) -> list[Trial]:
    return [Trial(node, part) for node, part in zip(nodes, parts, strict=True)]


@given(measured=measured_by(anything))
def test_a_quality_is_between_nothing_and_the_whole_and_has_a_reason(
    measured: UpdateFindings,
) -> None:
    quality = quality_of(measured)
    assert 0 <= quality.bps <= 10_000
    assert quality.reason
    assert quality.evaluator.startswith("quality/2 ")


@given(measured=measured_by(figures), better=st.floats(0, 1e6))
def test_better_work_is_never_worse(measured: UpdateFindings, better: float) -> None:
    before = quality_of(measured).bps
    if measured.agreement is not None:
        agreed = replace(measured, agreement=measured.agreement + better)
        assert quality_of(agreed).bps >= before
    if measured.worth is not None:
        assert quality_of(replace(measured, worth=measured.worth + better)).bps >= before


@given(measured=measured_by(figures), less=times)
def test_less_time_is_never_worse(measured: UpdateFindings, less: Milliseconds) -> None:
    sooner = replace(measured, took_ms=Milliseconds(max(0, measured.took_ms - less)))
    assert quality_of(sooner).bps >= quality_of(measured).bps


@given(
    nodes=st.lists(st.sampled_from([OFTEN, SELDOM, FREE]), min_size=JUDGED_LEAST, max_size=20),
    drawn=st.data(),
)
def test_nodes_of_equal_work_are_worth_the_same_however_often_each_is_judged(
    nodes: list[NodeId], drawn: st.DataObject
) -> None:
    # Equal work: what is found of it is as likely to be found of one node as of any other. Each
    # turn of the same findings through whoever was drawn is one way in which it may come.
    count = len(nodes)
    parts = drawn.draw(st.lists(parts_found, min_size=count, max_size=count))
    turns = [[*parts[turn:], *parts[:turn]] for turn in range(count)]
    worths = [worth_from_trials(trials_of(nodes, turned)) for turned in turns]
    found = [worth for worth in worths if worth is not None]
    assert len(found) in {0, count}
    if found:
        expected = fmean(worth.others for worth in found)
        for node in {*nodes, NEVER}:
            assert fmean(worth.of(node) for worth in found) == pytest.approx(expected, abs=1e-12)


@given(part=st.floats(1e-6, 5), often=st.integers(JUDGED_LEAST, 70), seldom=st.integers(0, 5))
def test_nodes_that_are_found_alike_have_the_whole_judged_often_or_never(
    part: float, often: int, seldom: int
) -> None:
    worth = worth_from_trials([*[Trial(OFTEN, part)] * often, *[Trial(SELDOM, part)] * seldom])
    assert worth is not None
    assert {worth.of(node) for node in (OFTEN, SELDOM, NEVER)} == {1.0}


def test_over_a_long_job_two_equals_are_paid_alike_though_one_is_judged_nine_times_as_often() -> (
    None
):
    chance = random.Random(11)
    trials: list[Trial] = []
    earned = {OFTEN: 0, SELDOM: 0, FREE: 0}
    for _ in range(RANDOM_TRIALS):
        drawn = OFTEN if chance.random() < 0.9 else SELDOM
        trials.append(Trial(drawn, max(0.0, chance.gauss(0.3, 0.25))))
        del trials[:-TRIALS_KEPT]
        worth = worth_from_trials(trials)
        for node in earned:
            known = None if worth is None else worth.of(node)
            quality = quality_of(UpdateFindings(agreement=1.0, typical_agreement=1.0, worth=known))
            earned[node] += quality.bps
    assert earned[SELDOM] == pytest.approx(earned[OFTEN], rel=0.02)
    assert earned[FREE] == pytest.approx(earned[OFTEN], rel=0.02)


def test_whoever_is_found_worthless_comes_to_nothing_and_takes_little_from_the_others() -> None:
    honest = [NodeId(f"0x{number:040x}") for number in range(10, 14)]
    worths = []
    trials: list[Trial] = []
    for _ in range(12):
        trials += [Trial(FREE, 0.0), *(Trial(node, 0.4) for node in honest)]
        worth = worth_from_trials(trials)
        assert worth is not None
        worths.append(worth)
    assert [worth.of(FREE) for worth in worths] == sorted(
        (worth.of(FREE) for worth in worths), reverse=True
    )
    assert worths[-1].of(FREE) < 0.13
    assert all(worth.of(node) > 0.85 for worth in worths for node in honest)
    assert all(worths[-1].of(node) > 0.96 for node in honest)


def test_few_trials_or_useless_ones_tell_nothing() -> None:
    assert worth_from_trials([Trial(FREE, 0.0), Trial(OFTEN, 1.0)]) is None
    assert worth_from_trials([Trial(FREE, 0.0)] * 5 + [Trial(OFTEN, 1.0)] * 4) is None
    assert worth_from_trials([Trial(FREE, 0.0)] * 500 + [Trial(OFTEN, 1.0)] * TRIALS_KEPT) == (
        {OFTEN: 1},
        1,
    )


@given(gain=st.floats(), whole=st.floats(), base=st.floats())
def test_a_trial_is_finite_or_none(gain: float, whole: float, base: float) -> None:
    trial = judged_trial(OFTEN, gain, whole, base)
    assert trial is None or 0 <= trial.part <= 1_000


@pytest.mark.parametrize(
    ("gain", "whole", "part"),
    [
        (0.1, 0.2, 0.5),
        (-0.1, 0.2, 0.0),
        (-math.inf, 0.2, 0.0),
        (-math.inf, -0.2, 0.0),
        (math.nan, math.nan, 0.0),
        (0.3, 0.2, 1.5),
        # Of rounds that take off less than a twentieth of the loss, chance has most.
        (0.1, 0.09, None),
        (0.1, 0.11, 10 / 11),
        (0.1, -0.2, None),
        (0.1, math.nan, None),
    ],
)
def test_a_trial_by_example(gain: float, whole: float, part: float | None) -> None:
    trial = judged_trial(OFTEN, gain, whole, 2.0)
    assert (None if trial is None else trial.part) == (
        None if part is None else pytest.approx(part)
    )


@given(typical=st.floats(1e-6, 1), worth=st.floats(0, 1))
def test_updates_without_worth_earn_nothing(typical: float, worth: float) -> None:
    for own in (0.0, -typical, math.nan, -math.inf):
        worthless = UpdateFindings(agreement=own, typical_agreement=typical, worth=worth)
        assert quality_of(worthless).bps == 0
    agreeing = UpdateFindings(agreement=typical, typical_agreement=typical, worth=0.0)
    assert quality_of(agreeing).bps == 0


@given(typical=st.floats(1e-6, 1))
def test_honest_updates_earn_the_whole(typical: float) -> None:
    for share in (0.5, 0.8, 3.0):
        honest = UpdateFindings(agreement=typical * share, typical_agreement=typical, worth=1.0)
        assert quality_of(honest).bps >= 9_999


@pytest.mark.parametrize(
    ("measured", "bps", "evaluator", "reason"),
    [
        (UpdateFindings(), 10_000, "unmeasured", "nothing to compare it with"),
        (
            UpdateFindings(agreement=0.01, typical_agreement=0.04),
            5_000,
            "agreement",
            "agrees by 0.01 where the round's median is 0.04",
        ),
        (
            UpdateFindings(agreement=0.04, typical_agreement=0.04, worth=0.25),
            2_500,
            "agreement+held-out",
            "median is 0.04; its node's judged updates are worth 25%",
        ),
        (
            UpdateFindings(agreement=0.01, typical_agreement=0.04, worth=0.5),
            2_500,
            "agreement+held-out",
            "are worth 50%",
        ),
        (UpdateFindings(worth=0.5), 5_000, "held-out", "its node's judged updates are worth 50%"),
        (UpdateFindings(is_round_idle=True), 5_000, "held-out", "neither it nor its round lowered"),
        (
            UpdateFindings(worth=1.0, is_round_idle=True),
            5_000,
            "held-out",
            "neither it nor its round",
        ),
        (
            UpdateFindings(agreement=1.0, typical_agreement=1.0, is_round_idle=True),
            10_000,
            "agreement",
            "agrees by 1",
        ),
        # Where honest updates do not agree either, agreement says nothing.
        (UpdateFindings(agreement=0.5, typical_agreement=-0.1), 10_000, "unmeasured", "nothing to"),
        (
            UpdateFindings(took_ms=Milliseconds(1_500), allowed_ms=Milliseconds(1_000)),
            7_500,
            "unmeasured",
            "500 ms after the deadline",
        ),
        (
            UpdateFindings(took_ms=Milliseconds(99_000), allowed_ms=Milliseconds(1_000)),
            5_000,
            "unmeasured",
            "98000 ms after the deadline",
        ),
        (UpdateFindings(took_ms=Milliseconds(99_000)), 10_000, "unmeasured", "nothing to"),
    ],
    ids=str,
)
def test_the_rule_by_example(
    measured: UpdateFindings, bps: int, evaluator: str, reason: str
) -> None:
    quality = quality_of(measured)
    assert (quality.bps, quality.evaluator) == (bps, f"quality/2 {evaluator}")
    assert reason in quality.reason

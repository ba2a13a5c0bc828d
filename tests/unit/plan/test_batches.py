"""Batches that grow where they were measured to be faster, and their learning rate."""

from itertools import pairwise

import pytest
from msgspec.structs import replace

from coordinator.core.training.plan.agreement import update_agreement
from coordinator.core.training.plan.batches import (
    batch_bounds,
    batch_rate,
    growth_after,
    growth_for_round,
)
from coordinator.core.training.plan.common_work import is_work_equal, lesser_work
from coordinator.core.training.plan.decision import (
    BatchGrowth,
    MemoryFit,
    NodePlan,
    NodeResult,
    PlanMemory,
    PlanRequest,
)
from hypergpu.ids import NodeId
from hypergpu.jobfile.spec import Aware, Data, Inner
from hypergpu.units import Milliseconds
from tests.unit.plan.fleet import Played, PlayedFleet, Truth, names, spec

N0 = NodeId("n0")
FILLED = Truth()
"""A node whose step takes twice as long for twice the batch."""
UNFILLED = Truth(fixed_ms=40.0)
"""A node most of whose step of 50 ms is there whatever the batch."""


NOISE, SIGNAL = 1.1, 2.8
"""Agreement of three updates that have a twentieth in common, and of three that hardly differ."""


def _play(
    truths: list[Truth], rounds: int, aware: Aware | None = None, agreement: float = NOISE
) -> list[Played]:
    job = spec(nodes=len(truths), aware=aware)
    fleet = PlayedFleet(job, dict(zip(names(len(truths)), truths, strict=True)), seed=3)
    fleet.agreement = agreement
    return [fleet.play() for _ in range(rounds)]


def _batches(rounds: list[Played], node: NodeId = N0) -> list[int]:
    return [round_.plan.nodes[node].batch(32) for round_ in rounds]


def test_a_batch_grows_to_four_times_where_that_is_faster_and_no_further() -> None:
    batches = _batches(_play([UNFILLED, FILLED, FILLED], 16))
    assert batches[0] == 32
    assert batches[-1] == 128
    assert all(after <= 2 * before for before, after in pairwise(batches))


def test_no_batch_grows_while_updates_go_the_same_way() -> None:
    """Where no noise is to be averaged, fewer steps would be less progress."""
    assert set(_batches(_play([UNFILLED, FILLED, FILLED], 24, agreement=SIGNAL))) == {32}


def _request(agreement: float | None, steps: int, before: float = 1.0) -> PlanRequest:
    fleet = PlayedFleet(spec(nodes=3), dict.fromkeys(names(3), FILLED))
    plan = NodePlan(steps, "int4", "")
    results = dict.fromkeys(names(3), NodeResult(plan, Milliseconds(1000)))
    previous = PlanMemory(steps, 0, is_sparse=False, noise_share=before)
    request = replace(fleet.request(names(3)), results=results, previous=previous)
    return replace(request, agreement=agreement)


def test_the_share_follows_the_noise_scale_of_updates() -> None:
    """A cosine of a half over 100 steps: batches of 100 times the job's are half noise."""
    measured_share = 1 + 0.02 * (1 + 100)
    assert update_agreement(_request(2.0, 100, measured_share)).noise_share == pytest.approx(
        measured_share
    )
    assert update_agreement(_request(2.0, 100)).noise_share == pytest.approx(
        1 + (measured_share - 1) / 4
    )
    assert update_agreement(_request(None, 100, 3.0)).noise_share == 3.0
    assert update_agreement(_request(0.9, 100, 8.0)).noise_share == 8.0
    assert update_agreement(_request(3.0, 1)).noise_share >= 1.0


def test_a_batch_that_is_no_faster_is_tried_twice_and_given_up() -> None:
    batches = _batches(_play([FILLED] * 3, 24))
    assert batches.count(64) == 2
    assert set(batches) == {32, 64}
    assert batches[-1] == 32


def test_a_grown_batch_does_more_samples_in_the_same_time() -> None:
    rounds = _play([UNFILLED, FILLED, FILLED], 20)
    plans = rounds[-1].plan.nodes
    work = {node: plan.inner_steps * plan.batch(32) for node, plan in plans.items()}
    assert work[N0] > 2 * work[NodeId("n1")]
    assert rounds[-1].error() <= 0.25


def test_a_reason_says_that_a_larger_batch_is_tried_or_kept() -> None:
    rounds = _play([UNFILLED, FILLED, FILLED], 16)
    reasons = [round_.plan.nodes[N0].reason for round_ in rounds]
    assert any(
        "batch 64 of 32: on trial, whether it is faster by the sample" in it for it in reasons
    )
    assert "batch 128 of 32: measured to be faster by the sample" in reasons[-1]


def test_a_batch_grows_within_memory() -> None:
    job = spec(nodes=3)
    assert batch_bounds(job, MemoryFit()) == (4, 128)
    assert batch_bounds(job, MemoryFit(micro_batch=80)) == (4, 80)
    assert batch_bounds(job, MemoryFit(micro_batch=8)) == (4, 32)
    own_passes = replace(job, inner=Inner(micro_batch=16))
    assert batch_bounds(own_passes, MemoryFit()) == (4, 32)


def test_no_batch_grows_where_updates_count_by_their_steps() -> None:
    skewed_spec = replace(spec(nodes=3), data=Data(sharding="dirichlet"))
    assert batch_bounds(skewed_spec, MemoryFit()) == (4, 32)


def test_a_batch_has_four_samples_unless_the_job_states_fewer() -> None:
    for stated_batch, least in ((3, 3), (4, 4), (8, 4), (64, 8)):
        job = spec(nodes=3)
        job = replace(job, training=replace(job.training, batch_size=stated_batch))
        assert batch_bounds(job, MemoryFit()).least == least


KNOWN = BatchGrowth(sample_us=1000.0, updates=2, samples=640)


def _result(steps: int, batch: int, compute_ms: int, took_ms: int = 1000) -> NodeResult:
    plan = NodePlan(steps, "int4", "", batch_size=batch)
    return NodeResult(plan, Milliseconds(took_ms), compute_ms=Milliseconds(compute_ms))


def test_the_slower_of_two_tries_decides() -> None:
    trial = replace(KNOWN, trial=64)
    once = growth_after(trial, _result(10, 64, 320), 32, 5)
    assert once.tries_us == (500.0,)
    kept_growth = growth_after(once, _result(10, 64, 384), 32, 6)
    assert (kept_growth.size, kept_growth.trial) == (64, 0)
    refused_growth = growth_after(once, _result(10, 64, 570), 32, 6)
    assert (refused_growth.size, refused_growth.trial, refused_growth.next_round) == (0, 0, 38)


def test_a_trial_ends_with_an_update_that_does_not_come_and_rests_longer_each_time() -> None:
    growth = KNOWN
    for rest in (32, 64, 128, 256, 256):
        growth = growth_after(replace(growth, trial=64), _result(10, 64, 0, 0), 32, 100)
        assert growth.next_round == 100 + rest


@pytest.mark.parametrize("batch", [16, 96])
def test_updates_of_another_batch_say_nothing_of_a_trial(batch: int) -> None:
    trial = replace(KNOWN, trial=64)
    assert growth_after(trial, _result(10, batch, 1), 32, 5) == trial


def test_a_first_short_update_is_forgotten_once_there_is_a_longer_one() -> None:
    """What surrounds a training would pass for slow samples."""
    growth = growth_after(BatchGrowth(), _result(1, 32, 1000), 32, 1)
    growth = growth_after(growth, _result(20, 32, 640), 32, 2)
    assert (growth.sample_us, growth.updates) == (1000.0, 1)


def test_no_batch_is_tried_without_steps_to_spare() -> None:
    bounds = batch_bounds(spec(nodes=3), MemoryFit())
    few, enough = (
        growth_for_round(KNOWN, bounds, 32, number=9, steps=steps, noise_share=2.0)
        for steps in (7.9, 8.0)
    )
    assert (few.trial, enough.trial) == (0, 64)


def test_rates_follow_the_root_of_the_batch_for_adamw_and_the_batch_for_sgd() -> None:
    job = spec(nodes=3)
    assert batch_rate(job, 32) == 0
    assert batch_rate(job, 128) == pytest.approx(2 * job.inner.learning_rate)
    assert batch_rate(job, 8) == pytest.approx(job.inner.learning_rate / 2)
    sgd = replace(job, inner=Inner(optimizer="sgd", learning_rate=0.1))
    assert batch_rate(sgd, 64) == pytest.approx(0.2)
    assert batch_rate(replace(job, aware=Aware(batch_rate="stated")), 128) == 0
    assert batch_rate(replace(job, aware=Aware(inner_steps_max=1)), 64) == 0


def test_plans_state_the_rate_of_a_batch_of_its_own() -> None:
    stated_rate = spec(nodes=3).inner.learning_rate
    scaled_plan, as_stated = (
        _play([UNFILLED, FILLED, FILLED], 16, Aware(batch_rate=rule))[-1].plan.nodes[N0]
        for rule in ("scaled", "stated")
    )
    assert scaled_plan.batch(32) == as_stated.batch(32) == 128
    assert scaled_plan.learning_rate == pytest.approx(2 * stated_rate)
    assert as_stated.learning_rate == 0


def test_a_pair_of_duplicates_has_one_batch_one_rate_and_one_codec() -> None:
    grown_plan = NodePlan(5, "int4", "", Milliseconds(900), batch_size=128, learning_rate=0.002)
    usual = NodePlan(20, "topk64", "", Milliseconds(900))
    first, second = lesser_work(grown_plan, usual, 32), lesser_work(usual, grown_plan, 32)
    assert is_work_equal(first, second, 32)
    assert (first.batch(32), first.learning_rate, first.codec) == (32, 0, "topk64")
    smaller = replace(grown_plan, batch_size=8, learning_rate=0.0005)
    first, second = lesser_work(smaller, usual, 32), lesser_work(usual, smaller, 32)
    assert is_work_equal(first, second, 32)
    assert (first.batch(32), first.learning_rate) == (8, 0.0005)

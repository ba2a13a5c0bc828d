from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.core.plan.batch_sizes import balanced_span_us, own_batch
from coordinator.core.plan.decision import Band, NodeMemory, NodeResult, RoundPlan
from coordinator.core.plan.planning import plan_round
from hypergpu.ids import NodeId
from hypergpu.jobfile.spec import Aware
from hypergpu.units import Milliseconds
from tests.unit.plan.fleet import SIZES, Fleet, Truth, names, reading_of, spec

FLEET = dict.fromkeys(names(5), Truth())
N0 = NodeId("n0")
EACH_STEP = spec(nodes=3, inner_steps=1, aware=Aware(inner_steps_max=1))
"""Its batch is 32."""


def plan_next(
    fleet: Fleet, truths: Mapping[NodeId, Truth], before: RoundPlan | None = None, **result: bool
) -> RoundPlan:
    """The plan after ``before``, of nodes of which the truth is known."""
    if before is not None:
        took = {n: NodeResult(p, p.forecast_ms or Milliseconds(1)) for n, p in before.nodes.items()}
        if result and N0 in before.nodes:
            took[N0] = NodeResult(before.nodes[N0], Milliseconds(0), **result)
        fleet.previous, fleet.results, fleet.number = before.memory, took, before.round + 1
    return plan_round(fleet.request(truths), {n: reading_of(t) for n, t in truths.items()}, SIZES)


def test_a_device_that_runs_out_of_memory_gets_half_the_batch_and_twice_the_steps() -> None:
    fleet = Fleet(spec(nodes=5), dict(FLEET))
    full = plan_next(fleet, FLEET)
    half = plan_next(fleet, FLEET, full, is_out_of_memory=True)
    assert half.nodes[N0].batch_size == 16
    assert "batch 16 of 32: a larger one ran out of memory" in half.nodes[N0].reason
    settled = plan_next(fleet, FLEET, half)
    assert settled.nodes[N0].inner_steps == pytest.approx(2 * full.nodes[N0].inner_steps, rel=0.1)
    assert settled.nodes[N0].forecast_ms == pytest.approx(full.nodes[N0].forecast_ms, rel=0.1)
    quarter = plan_next(fleet, FLEET, settled, is_out_of_memory=True)
    assert quarter.nodes[N0].batch_size == 8
    assert {part.batch_size for node, part in quarter.nodes.items() if node != N0} == {0}


def test_a_batch_that_fits_into_memory_outlives_what_was_measured() -> None:
    fleet = Fleet(spec(nodes=5), dict(FLEET))
    half = plan_next(fleet, FLEET, plan_next(fleet, FLEET), is_out_of_memory=True)
    fleet.previous, fleet.results = half.memory, {}
    unmeasured = plan_round(fleet.request(FLEET), {}, SIZES)
    assert unmeasured.nodes[N0].batch_size == 16


def test_a_slow_device_on_its_own_data_gets_a_smaller_batch_once_its_steps_are_the_fewest() -> None:
    fleet = Fleet(spec(nodes=5, sharding="dirichlet"), dict(FLEET))
    slow = {**FLEET, N0: Truth(step_ms=150)}
    plan = plan_next(fleet, slow)
    part = plan.nodes[N0]
    assert part.inner_steps >= plan.memory.inner_steps / 2
    assert 4 <= part.batch_size < 32
    assert f"batch {part.batch_size} of 32: a full one takes" in part.reason
    assert part.band is Band.LOW
    assert part.reason.startswith("low: ")


def test_a_slow_device_on_common_data_takes_fewer_steps_of_the_full_batch() -> None:
    fleet = Fleet(spec(nodes=5), dict(FLEET))
    part = plan_next(fleet, {**FLEET, N0: Truth(step_ms=150)}).nodes[N0]
    assert (part.batch_size, part.band) == (0, Band.LOW)


def test_a_device_that_is_fast_again_gets_the_full_batch_back() -> None:
    fleet = Fleet(spec(nodes=5, sharding="dirichlet"), dict(FLEET))
    slow = plan_next(fleet, {**FLEET, N0: Truth(step_ms=150)})
    assert slow.nodes[N0].batch_size
    assert plan_next(fleet, FLEET, slow).nodes[N0].batch_size == 0


def test_where_every_step_is_exchanged_fast_nodes_share_what_a_slow_one_leaves() -> None:
    truths = {NodeId("a"): Truth(), NodeId("b"): Truth(), NodeId("c"): Truth(step_ms=150)}
    plan = plan_next(Fleet(EACH_STEP, truths), truths)
    batches = {node: part.batch(32) for node, part in plan.nodes.items()}
    assert sum(batches.values()) == pytest.approx(96, abs=2)
    assert batches[NodeId("a")] > 32 > batches[NodeId("c")] >= 4


def test_a_node_whose_line_fills_the_round_keeps_its_batch() -> None:
    batch = own_batch(spec(nodes=3), NodeMemory(""), fewest_us=1e6, room_us=-1.0)
    assert batch == (32, "")


def test_noise_changes_no_batch() -> None:
    job = spec(nodes=3)
    memory = NodeMemory("int4", batch_size=16)
    sizes = {own_batch(job, memory, fewest_us=1e6, room_us=5e5 * n).size for n in (0.92, 1, 1.08)}
    assert sizes == {16}


def test_a_node_whose_update_was_missing_has_less_to_do() -> None:
    cut = own_batch(spec(nodes=3), NodeMemory("", cut_rounds=1), fewest_us=1e6, room_us=1e6)
    assert cut.size == 16


@given(
    st.lists(st.tuples(st.floats(1, 1e6), st.floats(0, 1e6)), min_size=1, max_size=8),
    st.integers(0, 64),
    st.integers(0, 3),
)
def test_a_batch_lies_within_its_limits_and_says_why_it_is_no_full_one(
    nodes: list[tuple[float, float]], most: int, cuts: int
) -> None:
    span_us = balanced_span_us(*zip(*nodes, strict=True))
    memory = NodeMemory("int4", batch_most=most, cut_rounds=cuts)
    for step_us, moving_us in nodes:
        batch = own_batch(EACH_STEP, memory, fewest_us=step_us, room_us=span_us - moving_us)
        assert 1 <= batch.size <= (most or 64)
        assert (batch.size == 32) == (not batch.reason)

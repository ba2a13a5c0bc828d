"""How work is shared by a plan: batch sizes, weights, transfers, deadlines."""

from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from coordinator.core.network.reading import Conditions, Estimate, NodeReading
from coordinator.core.training.job.state import AcceptedUpdate
from coordinator.core.training.plan.batches import (
    BatchBounds,
    batch_bounds,
    own_batch,
)
from coordinator.core.training.plan.connections import connection_count
from coordinator.core.training.plan.deadline import UpdateArrival, deadline
from coordinator.core.training.plan.decision import (
    MemoryFit,
    ModelSizes,
    NodeMemory,
    NodeResult,
    PlanMemory,
    RoundPlan,
)
from coordinator.core.training.plan.planning import plan_round
from coordinator.core.training.plan.span import balanced_span_us
from coordinator.core.training.plan.uploads import PlannedUpload, upload_delays
from coordinator.core.training.sample_weights import update_weights
from hypergpu.ids import NodeId
from hypergpu.jobfile.spec import Aware
from hypergpu.units import Bytes, Microseconds, Milliseconds, Samples
from tests.unit.job_states import update
from tests.unit.plan.fleet import SIZES, PlayedFleet, Truth, names, reading_of, spec

FLEET = dict.fromkeys(names(5), Truth())
N0 = NodeId("n0")
EACH_STEP = spec(nodes=3, inner_steps=1, aware=Aware(inner_steps_max=1))
"""Its batch is 32."""


def plan_next(
    fleet: PlayedFleet, truths: Mapping[NodeId, Truth], before: RoundPlan | None = None
) -> RoundPlan:
    """The plan after ``before``, of nodes of which the truth is known."""
    if before is not None:
        took = {n: NodeResult(p, p.forecast_ms or Milliseconds(1)) for n, p in before.nodes.items()}
        fleet.previous, fleet.results, fleet.number = before.memory, took, before.round + 1
    return plan_round(fleet.request(truths), {n: reading_of(t) for n, t in truths.items()}, SIZES)


@pytest.mark.parametrize("is_measured", [True, False])
def test_a_device_short_of_memory_keeps_batch_and_steps_and_has_fewer_samples_at_once(
    *,
    is_measured: bool,
) -> None:
    fleet = PlayedFleet(spec(nodes=5), dict(FLEET))
    request = fleet.request(FLEET)
    readings = {n: reading_of(t) for n, t in FLEET.items()} if is_measured else {}
    whole = plan_round(request, readings, SIZES).nodes[N0]
    part = plan_round(replace(request, fits={N0: MemoryFit(16, why="so")}), readings, SIZES).nodes[
        N0
    ]
    why = "micro-batch 16 of 32: so"
    assert part == replace(whole, micro_batch=16, reason=f"{whole.reason}; {why}")


def test_a_slow_device_on_its_own_data_gets_a_smaller_batch_once_its_steps_are_the_fewest() -> None:
    fleet = PlayedFleet(spec(nodes=5, sharding="dirichlet"), dict(FLEET))
    slow = {**FLEET, N0: Truth(step_ms=150)}
    plan = plan_next(fleet, slow)
    part = plan.nodes[N0]
    assert part.inner_steps >= plan.memory.inner_steps / 2
    assert 4 <= part.batch_size < 32
    assert f"batch {part.batch_size} of 32: a full one takes" in part.reason


def test_a_slow_device_on_common_data_takes_fewer_steps_of_the_full_batch() -> None:
    fleet = PlayedFleet(spec(nodes=5), dict(FLEET))
    part = plan_next(fleet, {**FLEET, N0: Truth(step_ms=150)}).nodes[N0]
    assert part.batch_size == 0
    assert "of the median node's work fits in" in part.reason


def test_a_device_that_is_fast_again_gets_the_full_batch_back() -> None:
    fleet = PlayedFleet(spec(nodes=5, sharding="dirichlet"), dict(FLEET))
    slow = plan_next(fleet, {**FLEET, N0: Truth(step_ms=150)})
    assert slow.nodes[N0].batch_size
    assert plan_next(fleet, FLEET, slow).nodes[N0].batch_size == 0


def test_where_every_step_is_exchanged_fast_nodes_share_what_a_slow_one_leaves() -> None:
    truths = {NodeId("a"): Truth(), NodeId("b"): Truth(), NodeId("c"): Truth(step_ms=150)}
    plan = plan_next(PlayedFleet(EACH_STEP, truths), truths)
    batches = {node: part.batch(32) for node, part in plan.nodes.items()}
    assert sum(batches.values()) == pytest.approx(96, abs=2)
    assert batches[NodeId("a")] > 32 > batches[NodeId("c")] >= 4


STATED = BatchBounds(4, 32)


def test_a_node_whose_line_fills_the_round_keeps_its_batch() -> None:
    batch = own_batch(spec(nodes=3), NodeMemory(""), STATED, fewest_us=1e6, room_us=-1.0)
    assert (batch.size, batch.reason) == (32, "")


def test_noise_changes_no_batch() -> None:
    job = spec(nodes=3)
    memory = NodeMemory("int4", batch_size=16)
    sizes = {
        own_batch(job, memory, STATED, fewest_us=1e6, room_us=5e5 * n).size for n in (0.92, 1, 1.08)
    }
    assert sizes == {16}


def test_a_node_whose_update_was_missing_has_less_to_do() -> None:
    cut = own_batch(spec(nodes=3), NodeMemory("", cut_rounds=1), STATED, fewest_us=1e6, room_us=1e6)
    assert cut.size == 16


@given(
    st.lists(st.tuples(st.floats(1, 1e6), st.floats(0, 1e6)), min_size=1, max_size=8),
    st.integers(0, 3),
)
def test_a_batch_lies_within_its_limits_and_says_why_it_is_no_full_one(
    nodes: list[tuple[float, float]], cuts: int
) -> None:
    span_us = balanced_span_us(*zip(*nodes, strict=True))
    memory = NodeMemory("int4", cut_rounds=cuts)
    for step_us, moving_us in nodes:
        bounds = batch_bounds(EACH_STEP, MemoryFit())
        room_us = span_us - moving_us
        batch = own_batch(EACH_STEP, memory, bounds, fewest_us=step_us, room_us=room_us)
        assert 1 <= batch.size <= 64
        assert (batch.size == 32) == (not batch.reason)


ONE, TWO = NodeId("a"), NodeId("b")


def _work(samples: int, steps: int) -> AcceptedUpdate:
    return replace(update("any"), samples=Samples(samples), inner_steps=steps)


def _works(**steps: int) -> dict[NodeId, AcceptedUpdate]:
    return {NodeId(node): _work(32 * mine, mine) for node, mine in steps.items()}


def test_an_update_of_common_data_counts_by_its_samples() -> None:
    own_weights = update_weights(_works(a=10, b=160), "iid")
    assert own_weights.weights == {ONE: 320, TWO: 5120}
    assert own_weights.scale == 1


def test_updates_of_nodes_with_own_data_count_alike_whatever_their_steps() -> None:
    own_weights = update_weights(_works(a=40, b=60), "dirichlet")
    assert own_weights.weights[ONE] == own_weights.weights[TWO]
    assert 1 < own_weights.scale < 1.25


def test_equal_steps_on_own_data_need_no_scale() -> None:
    own_weights = update_weights(_works(a=30, b=30), "dirichlet")
    assert own_weights.weights[ONE] == own_weights.weights[TWO]
    assert own_weights.scale == 1


def test_updates_of_nodes_with_own_data_count_alike_whatever_their_batches() -> None:
    own_weights = update_weights({ONE: _work(48, 1), TWO: _work(16, 1)}, "dirichlet")
    assert own_weights.weights[ONE] == own_weights.weights[TWO]
    assert own_weights.scale == 1


def test_two_steps_among_hundreds_are_not_blown_up() -> None:
    own_weights = update_weights(_works(a=2, b=100, c=100), "dirichlet")
    # Unclamped, the two steps would count as much as a hundred.
    assert own_weights.weights[ONE] * 10 < own_weights.weights[TWO]
    assert own_weights.scale <= 1.25


A, B, C = (NodeId(name) for name in "abc")
LARGE = Bytes(2_000_000)


def _count(truth: Truth, size: int = LARGE, held: int = 0) -> int:
    return connection_count(reading_of(truth), NodeReading(), Bytes(size), held)


def test_senders_that_know_their_rate_have_one_connection() -> None:
    assert _count(Truth(loss=0.05, rtt_ms=300, congestion_control="bbr")) == 1


def test_senders_that_heed_losses_have_sixteen_where_packets_are_lost() -> None:
    reading = _over_one_connection(Truth(loss=0.01, rtt_ms=150, up_mbit_s=0.8, down_mbit_s=0.8))
    assert connection_count(reading, NodeReading(), LARGE, 0) == 16


def _over_one_connection(truth: Truth) -> NodeReading:
    then = Conditions(Microseconds(int(truth.rtt_ms * 1000)), 1)
    return replace(reading_of(truth), up_conditions=then, down_conditions=then)


def test_four_do_where_nothing_is_lost() -> None:
    assert _count(Truth(rtt_ms=150)) == 4


def test_four_do_where_losses_do_not_limit_the_line() -> None:
    assert _count(Truth(loss=0.001, rtt_ms=10, up_mbit_s=2, down_mbit_s=2)) == 4


def test_a_small_payload_has_one() -> None:
    assert _count(Truth(loss=0.05, rtt_ms=300), size=60_000) == 1


def test_connections_that_are_there_are_kept_when_probes_lose_nothing_for_once() -> None:
    truth = Truth(loss=0.01, rtt_ms=150, up_mbit_s=1, down_mbit_s=1)
    lucky = replace(reading_of(truth), packets_lost=0.0, bursts_lost=0.0)
    assert connection_count(lucky, NodeReading(), LARGE, 16) == 16


def test_losses_that_are_only_inferred_count_as_they_are() -> None:
    truth = Truth(rtt_ms=150, up_mbit_s=3, down_mbit_s=3)
    blocked_reading = replace(
        _over_one_connection(truth),
        is_probing_blocked=True,
        packets_sent=0.0,
        packets_lost=0.0,
        bursts_lost=0.0,
        loss_bound=0.01,
    )
    assert connection_count(blocked_reading, NodeReading(), LARGE, 0) > 4


def _upload(ready_ms: int, mbit_s: float, size: int = 1_000_000) -> PlannedUpload:
    return PlannedUpload(ready_ms * 1000, Bytes(size), mbit_s * 1e6)


def test_nobody_waits_while_the_line_has_room_or_is_not_known() -> None:
    uploads = {A: _upload(0, 40), B: _upload(0, 40)}
    assert upload_delays(uploads, 100_000_000) == {A: 0, B: 0}
    assert upload_delays(uploads, 0) == {A: 0, B: 0}


def test_uploads_that_would_collide_go_one_after_the_other() -> None:
    uploads = {A: _upload(0, 100), B: _upload(10, 100), C: _upload(20, 100)}
    # 8 Mbit at 100 Mbit/s take 80 ms.
    assert upload_delays(uploads, 100_000_000) == {A: 0, B: 70, C: 140}


def test_nobody_waits_when_waiting_would_end_the_round_later() -> None:
    # One slow upload and a fast one that would wait for all of it.
    uploads = {A: _upload(0, 60, 6_000_000), B: _upload(1, 100, 1_000_000)}
    assert upload_delays(uploads, 100_000_000) == {A: 0, B: 0}


def _at(mean_ms: int, spread_ms: int = 100, samples: int = 640) -> UpdateArrival:
    return UpdateArrival(Milliseconds(mean_ms), Milliseconds(spread_ms), Samples(samples))


def test_all_are_waited_for_that_come_together() -> None:
    deadline_ms = deadline([_at(5000), _at(5200), _at(5400), _at(5100)], 3)
    assert 5400 + 300 < deadline_ms < 1.25 * 6000


def test_one_that_is_three_times_as_slow_is_not_waited_for() -> None:
    assert deadline([_at(5000), _at(5200), _at(5400), _at(15_000)], 3) < 8000


def test_it_is_never_before_the_quorum_is_likely() -> None:
    assert deadline([_at(5000), _at(5200), _at(5400), _at(15_000)], 4) > 15_000


def test_the_slow_one_is_waited_for_that_does_most_of_the_work() -> None:
    slow = _at(15_000, samples=20_000)
    assert deadline([_at(5000), _at(5200), _at(5400), slow], 3) > 15_000


def test_no_round_is_so_short_that_its_deadline_is_none() -> None:
    assert deadline([_at(0, 0), _at(0, 0)], 1) == 1_000
    assert deadline([_at(1, 0), _at(400, 0)], 2) == 1_000


def without_bytes() -> ModelSizes:
    """A model that is moved at once."""
    return replace(SIZES, update_bytes=dict.fromkeys(SIZES.update_bytes, Bytes(1000)))


@pytest.mark.parametrize(("step_ms", "steps"), [(1, 20), (200, 10)])
def test_rounds_on_a_fast_line_take_the_stated_steps_where_those_are_short(
    step_ms: float, steps: int
) -> None:
    near = Truth(step_ms=step_ms, up_mbit_s=1000, down_mbit_s=1000, rtt_ms=1)
    truths = dict.fromkeys(names(3), near)
    fleet = PlayedFleet(spec(nodes=3), truths, sizes=without_bytes())
    for _ in range(3):
        fleet.play()
    assert fleet.play().plan.memory.inner_steps == steps


def test_a_node_whose_updates_are_too_small_to_measure_its_line_is_measured_by_its_steps() -> None:
    truths = dict.fromkeys(names(3), Truth(step_ms=1))
    known_readings = {node: reading_of(truth) for node, truth in truths.items()}
    unseen_readings = {
        node: replace(each, up_bits_per_s=NodeReading().up_bits_per_s, forecast_error=Estimate())
        for node, each in known_readings.items()
    }
    request = PlayedFleet(spec(nodes=3), truths).request(truths)
    request = replace(request, previous=PlanMemory(20, changed_at_round=0, is_sparse=False))
    plan = plan_round(request, unseen_readings, without_bytes())
    assert all(part.forecast_ms > 0 for part in plan.nodes.values())
    assert plan.deadline_ms == 1_000

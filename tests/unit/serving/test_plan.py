"""Plans of models for nodes that are there."""

from pathlib import Path

import pytest

from hypergpu.rings.stage_work import (
    LIBRARY_BYTES,
    STAGE_KIND,
    CutSizes,
    layers_in,
    memory_for_models,
)
from hypergpu.user.client.values import (
    EstimateView,
    HealthHistoryView,
    HealthView,
    NodeView,
    ReadingView,
)
from hypergpu.user.serving.plan import plan_model
from hypergpu.user.serving.ring_file import read_ring_file
from hypergpu.user.serving.ring_submitting import ring_notes

SIZES = CutSizes("llama", 8, 64, layer_bytes=100, end_bytes=50, total_bytes=900, token_bytes=4)


def node(name: str, memory_bytes: int, *, state: str = "idle", trip_us: float = 0.0) -> NodeView:
    reading = ReadingView(EstimateView(trip_us, 0.0, 1, 0), None, None, None, None, None, None)
    return NodeView(
        id=f"0x{name}",
        state=state,
        reason="",
        device="cuda",
        device_name="",
        memory_bytes=memory_bytes,
        worker="torch",
        workloads={STAGE_KIND: 1},
        job=None,
        last_seen_ms_ago=0,
        software="",
        updates_accepted=0,
        updates_rejected=0,
        reading=reading,
        health=HealthView(1.0, "high", 1.0, 1.0, 1.0, 1.0, "", 0),
        health_history=HealthHistoryView(6, ()),
        plan_reason="",
        name=name,
    )


def test_as_few_nodes_as_can_hold_it_and_the_nearest_of_them() -> None:
    nodes = [
        node("far", 900, trip_us=90_000),
        node("near", 900, trip_us=1_000),
        node("nearer", 900, trip_us=500),
        node("small", 200),
    ]
    plan = plan_model("m", SIZES, nodes, STAGE_KIND)
    assert {each.name for each in plan.stages} == {"near", "nearer"}
    assert sum(each.layers for each in plan.stages) == 8
    assert all(each.memory_bytes == 100 * each.layers + 50 for each in plan.stages)
    assert plan.hops_ms == pytest.approx(1.5)


def test_a_node_that_holds_all_of_it_is_named_alone() -> None:
    plan = plan_model("m", SIZES, [node("large", 2_000), node("other", 900)], STAGE_KIND)
    assert [(each.name, each.layers) for each in plan.stages] == [("large", 8)]


def test_what_is_missing_is_told_in_bytes() -> None:
    # 0.7 of 300 bytes hold one layer beside an end of the model.
    nodes = [node("one", 300), node("two", 300), node("gone", 9_000, state="lost")]
    plan = plan_model("m", SIZES, nodes, STAGE_KIND)
    assert not plan.is_possible
    assert plan.missing_bytes == 600


def test_each_node_is_told_with_what_it_could_hold_and_what_it_lacks() -> None:
    nodes = [node("small", 100), node("part", 500), node("gone", 9_000, state="lost")]
    plan = plan_model("m", SIZES, [*nodes, node("all", 2_000)], STAGE_KIND)
    # All layers with an end take 850 bytes, which are 0.7 of 1,215.
    assert [(each.name, each.layers, each.missing_bytes) for each in plan.nodes] == [
        ("all", 8, 0),
        ("part", 3, 715),
        ("small", 0, 1_115),
        ("gone", 0, 0),
    ]
    reasons = [each.reason for each in plan.nodes]
    assert reasons == ["", "", "it has no room for one layer", "it is lost"]


def test_who_could_hold_a_base_whole_is_told_before_a_ring_trains_it(tmp_path: Path) -> None:
    lines = ['workload = "hf-causal-lm"', "[data]", 'path = "text"', "[stages]", "count = 3"]
    (tmp_path / "job.toml").write_text("\n".join(lines))
    job = read_ring_file(tmp_path / "job.toml")
    assert job is not None
    _, note = ring_notes(job, SIZES, [node("large", 2_000), node("small", 200)])
    assert note.startswith("large can hold the base whole: without [stages] it is trained data-par")
    assert len(ring_notes(job, SIZES, [node("small", 200)])) == 1


def test_a_cpus_memory_holds_the_libraries_too() -> None:
    limit_bytes = LIBRARY_BYTES + 1_000
    assert memory_for_models("cpu", limit_bytes) == 1_000
    assert memory_for_models("cuda", limit_bytes) == limit_bytes
    assert memory_for_models("cpu", 0) == 0
    assert layers_in(SIZES, memory_for_models("cpu", LIBRARY_BYTES)) == 0

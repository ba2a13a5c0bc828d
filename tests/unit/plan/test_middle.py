from msgspec.structs import replace

from coordinator.core.plan.decision import NodePlan, NodeResult, PlanMemory, PlanRequest
from coordinator.core.plan.middle import computing_for, decay_steps, drift
from coordinator.core.plan.spreading import fitted
from hypergpu.ids import NodeId, Slot
from hypergpu.spec import Inner
from hypergpu.units import Milliseconds, Samples
from tests.unit.plan.fleet import names, spec, total_samples

NODES = names(5)


def _request(agreement: float | None, *, is_sparse: bool = False, crowded: int = 0) -> PlanRequest:
    job = spec(nodes=5)
    part = NodePlan(20, "int4", Milliseconds(1), Milliseconds(1), "")
    return PlanRequest(
        round=20,
        at_ms=Milliseconds(0),
        spec=job,
        candidates={node: Slot(slot) for slot, node in enumerate(NODES)},
        samples_done=Samples(0),
        samples_total=total_samples(job),
        previous=PlanMemory(80, 3, is_sparse=is_sparse, crowded_rounds=crowded),
        results={node: NodeResult(part, Milliseconds(1)) for node in NODES},
        agreement=agreement,
    )


def test_three_rounds_of_updates_that_do_not_agree_halve_the_steps() -> None:
    assert drift(_request(1.1, crowded=1), 0.1).factor == 1
    assert drift(_request(1.1, crowded=2), 0.1).factor == 0.5
    assert drift(_request(1.4, crowded=2), 0.1).crowded_rounds == 0


def test_updates_that_agree_earn_more_steps_where_bytes_take_a_fifth() -> None:
    assert drift(_request(3.5), 0.3).factor == 1.25
    assert drift(_request(3.5), 0.1).factor == 1


def test_sparse_updates_always_look_as_if_they_did_not_agree() -> None:
    assert drift(_request(1.0, is_sparse=True, crowded=2), 0.1).factor == 1


def test_steps_grow_as_the_learning_rate_decays() -> None:
    request = _request(None)
    assert decay_steps(request) == 0
    cosine = replace(request, spec=replace(request.spec, inner=Inner(schedule="cosine")))
    half = replace(cosine, samples_done=Samples(request.samples_total // 2))
    assert decay_steps(cosine) == 20
    assert decay_steps(half) == 80


def test_computing_is_long_enough_for_the_users_share_of_it() -> None:
    computing = computing_for(1_000_000, 100_000, 0.85)
    assert 0.85 < computing / (computing + 1_000_000) < 0.9


def test_an_upload_that_takes_most_of_the_moving_asks_for_more() -> None:
    assert computing_for(1_000_000, 2_000_000, 0.85) > computing_for(1_000_000, 100_000, 0.85)


def test_the_last_two_rounds_are_of_equal_length() -> None:
    node = NodeId("n0")
    assert fitted({node: 100}, 10, 5000) == {node: 100}
    assert fitted({node: 100}, 10, 1200) == {node: 60}
    assert fitted({node: 100}, 10, 600) == {node: 60}

from collections.abc import Sequence
from math import sqrt

import numpy as np
import numpy.typing as npt
import pytest
from msgspec.structs import replace

from coordinator.core.plan.decision import NodePlan, NodeResult, PlanMemory, PlanRequest
from coordinator.core.plan.median_node import (
    Drift,
    computing_for,
    cosine,
    decay_steps,
    drift,
    wanted_steps,
)
from coordinator.core.plan.node_steps import fit_steps
from coordinator.shell.aggregation.agreement import Agreement
from hypergpu.ids import NodeId, Slot
from hypergpu.jobfile.spec import Inner
from hypergpu.tensors.compression import scheme_named
from hypergpu.units import Milliseconds, Samples
from tests.unit.plan.fleet import names, spec, total_samples

FLEETS = (3, 8, 30)
Updates = npt.NDArray[np.float64]


def _request(
    agreement: float | None,
    *,
    nodes: int = 8,
    is_sparse: bool = False,
    crowded: int = 0,
    factor: float = 1.0,
) -> PlanRequest:
    job = spec(nodes=nodes)
    part = NodePlan(20, "int4", Milliseconds(1), Milliseconds(1), "")
    return PlanRequest(
        round=20,
        at_ms=Milliseconds(0),
        spec=job,
        candidates={node: Slot(slot) for slot, node in enumerate(names(nodes))},
        samples_done=Samples(0),
        samples_total=total_samples(job),
        previous=PlanMemory(80, 3, is_sparse=is_sparse, crowded_rounds=crowded, drift=factor),
        results={node: NodeResult(part, Milliseconds(1)) for node in names(nodes)},
        agreement=agreement,
    )


def _agreement(updates: Updates) -> float:
    """What the coordinator makes of such updates while it folds them."""
    scheme, values = scheme_named("fp32"), updates.shape[1]
    agreement = Agreement(len(updates), values)
    for index, update in enumerate(updates):
        agreement.add(index, scheme, update.astype("<f4").view(np.uint8), range(values))
    agreement.end_span()
    found = agreement.agreement()
    assert found is not None
    return found


def _updates(nodes: int, cosine: float, norms: Sequence[float] | None = None) -> Updates:
    """With such a cosine between any two of them, but for what chance adds."""
    dice = np.random.default_rng(nodes)
    shared, own = dice.standard_normal(16_384), dice.standard_normal((nodes, 16_384))
    updates: Updates = np.sqrt(cosine) * shared + np.sqrt(1 - cosine) * own
    updates *= np.reshape(norms or [1.0] * nodes, (nodes, 1))
    return updates


@pytest.mark.parametrize("nodes", FLEETS)
def test_orthogonal_updates_have_an_agreement_of_1_and_equal_ones_of_their_number(
    nodes: int,
) -> None:
    assert _agreement(_updates(nodes, 0.0)) == pytest.approx(1, abs=0.3)
    assert _agreement(_updates(nodes, 1.0)) == pytest.approx(nodes)


@pytest.mark.parametrize("nodes", FLEETS)
@pytest.mark.parametrize("first_steps", [20, 160])
def test_the_cosine_between_updates_is_made_out_however_many_there_are(
    nodes: int, first_steps: int
) -> None:
    steps = [first_steps] + [20] * (nodes - 1)
    for truth in (0.0, 0.1, 0.5):
        updates = _updates(nodes, truth, [sqrt(each) for each in steps])
        assert cosine(_agreement(updates), steps) == pytest.approx(truth, abs=0.03)


@pytest.mark.parametrize("nodes", FLEETS)
def test_three_rounds_of_updates_that_do_not_agree_halve_the_steps(nodes: int) -> None:
    crowded, fair = (1 + share * (nodes - 1) for share in (0.03, 0.06))
    assert drift(_request(crowded, nodes=nodes, crowded=1), 0.1).factor == 1
    assert drift(_request(crowded, nodes=nodes, crowded=2), 0.1).factor == 0.5
    assert drift(_request(fair, nodes=nodes, crowded=2), 0.1) == Drift()


@pytest.mark.parametrize("nodes", FLEETS)
def test_updates_that_agree_earn_more_steps_where_bytes_take_a_fifth(nodes: int) -> None:
    agreed = 1 + 0.3 * (nodes - 1)
    assert drift(_request(agreed, nodes=nodes), 0.3).factor == 1.25
    assert drift(_request(agreed, nodes=nodes), 0.1).factor == 1


@pytest.mark.parametrize("nodes", FLEETS)
def test_steps_that_were_halved_grow_back_when_updates_are_orthogonal_no_more(nodes: int) -> None:
    uncrowded, fair = (1 + share * (nodes - 1) for share in (0.1, 0.06))
    assert drift(_request(uncrowded, nodes=nodes, factor=0.5), 0.01).factor == 0.625
    assert drift(_request(uncrowded, nodes=nodes, factor=0.9), 0.01).factor == 1
    assert drift(_request(fair, nodes=nodes, factor=0.5), 0.01).factor == 0.5


def test_updates_that_do_not_agree_take_steps_off_what_the_job_can_be_divided_by() -> None:
    assert wanted_steps(_request(None), 4000, 100, Drift(0.5))[0] == 50
    assert wanted_steps(_request(None), 4000, 100, Drift(1.25))[0] == 100


def test_sparse_updates_always_look_as_if_they_did_not_agree() -> None:
    assert drift(_request(1.0, is_sparse=True, crowded=2), 0.1).factor == 1


def test_steps_grow_as_the_learning_rate_decays() -> None:
    request = _request(None)
    assert decay_steps(request) == 0
    decaying = replace(request, spec=replace(request.spec, inner=Inner(schedule="cosine")))
    half = replace(decaying, samples_done=Samples(request.samples_total // 2))
    assert decay_steps(decaying) == 20
    assert decay_steps(half) == 80


def test_computing_is_long_enough_for_the_users_share_of_it() -> None:
    computing = computing_for(1_000_000, 100_000, 0.85)
    assert 0.85 < computing / (computing + 1_000_000) < 0.9


def test_an_upload_that_takes_most_of_the_moving_asks_for_more() -> None:
    assert computing_for(1_000_000, 2_000_000, 0.85) > computing_for(1_000_000, 100_000, 0.85)


def test_the_last_two_rounds_are_of_equal_length() -> None:
    node = NodeId("n0")
    assert fit_steps({node: 100}, {node: 10}, 5000) == {node: 100}
    assert fit_steps({node: 100}, {node: 10}, 1200) == {node: 60}
    assert fit_steps({node: 100}, {node: 10}, 600) == {node: 60}

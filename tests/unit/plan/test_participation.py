"""Who takes part in a round, and the node in the middle that a plan goes by."""

from collections.abc import Mapping, Sequence
from math import sqrt

import numpy as np
import numpy.typing as npt
import pytest
from msgspec.structs import replace

from coordinator.core.network.reading import Estimate, NodeReading
from coordinator.core.training.plan.agreement import cosine, update_agreement
from coordinator.core.training.plan.decision import (
    NodeMemory,
    NodePlan,
    NodeResult,
    PlanMemory,
    PlanRequest,
)
from coordinator.core.training.plan.inner_steps import fit_steps
from coordinator.core.training.plan.median_node import (
    Drift,
    computing_for,
    decay_steps,
    drift,
    wanted_steps,
)
from coordinator.core.training.plan.memories import node_memories
from coordinator.core.training.plan.participation import (
    Participation,
    PartOfMiddle,
    participations,
)
from coordinator.core.training.plan.planning import plan_round
from hypergpu.ids import NodeId, Slot
from hypergpu.jobfile.spec import Aware, Inner
from hypergpu.units import Milliseconds, Samples
from tests.unit.plan.fleet import SIZES, Truth, names, reading_of, spec, total_samples

NODES = names(5)
SLOW = NODES[0]
EQUAL = dict.fromkeys(NODES, PartOfMiddle(1.0, 1.0, is_measured=True))
STARTING, AWAY = NodeReading(is_starting=True), NodeReading(is_present=False)
PART = NodePlan(20, "int4", "", Milliseconds(1), Milliseconds(1))


def _request(
    memories: Mapping[NodeId, NodeMemory],
    results: Mapping[NodeId, NodeResult],
    *,
    number: int = 10,
    quorum: float = 0.6,
) -> PlanRequest:
    return PlanRequest(
        round=number,
        at_ms=Milliseconds(0),
        spec=spec(nodes=5, quorum=quorum),
        candidates={node: Slot(slot) for slot, node in enumerate(NODES)},
        samples_done=Samples(0),
        samples_total=Samples(1_000_000),
        previous=PlanMemory(20, 0, is_sparse=False, nodes=dict(memories)),
        results=dict(results),
    )


def _part(
    work: PartOfMiddle,
    memory: NodeMemory | None = None,
    *,
    took_ms: int | None = 1,
    is_lapsed: bool = False,
    quorum: float = 0.6,
) -> Participation:
    """The slow node's part when it does so much; None: it had no part in the last round."""
    memory = memory or NodeMemory("int4")
    took = dict.fromkeys(NODES, 1) | {SLOW: took_ms or 0}
    if took_ms is None:
        del took[SLOW]
    results = {
        node: NodeResult(PART, Milliseconds(ms), is_lapsed and node == SLOW)
        for node, ms in took.items()
    }
    request = _request({SLOW: memory}, results, quorum=quorum)
    works = EQUAL | {SLOW: work}
    return participations(request, node_memories(request), works, {})[SLOW]


def share(of_middle: float, computing: float = 1.0, *, is_measured: bool = True) -> PartOfMiddle:
    return PartOfMiddle(of_middle, computing, is_measured)


def test_a_round_waits_for_a_node_that_does_a_quarter_of_the_middle_ones_work() -> None:
    assert _part(share(0.3)).is_awaited
    assert not _part(share(0.2)).is_awaited


def test_who_is_waited_for_is_not_given_up_for_a_little_noise() -> None:
    kept_memory = NodeMemory("int4", is_awaited=True)
    assert _part(share(0.22), kept_memory).is_awaited
    assert not _part(share(0.22)).is_awaited


@pytest.mark.parametrize("times", [4.5, 64, 1e6])
def test_a_node_that_is_slow_takes_part_in_every_round_and_nobody_waits_for_it(
    times: float,
) -> None:
    part = _part(share(1 / times))
    assert part.is_taking_part
    assert not part.is_awaited
    assert part.reason.endswith("of the median node's work fits in; no round waits")


def test_nobody_waits_for_a_node_that_mostly_moves_bytes() -> None:
    part = _part(share(0.9, computing=0.4))
    assert part.is_taking_part
    assert not part.is_awaited
    assert part.reason == "it would move bytes for most of a round; no round waits"


def test_nobody_waits_for_a_node_of_which_nothing_is_known() -> None:
    part = _part(share(1.0, is_measured=False))
    assert part.reason == "nothing of its speed is known yet; no round waits"
    assert not part.is_awaited


def test_somebody_is_waited_for_however_slow_all_are() -> None:
    request = _request({}, {})
    works = dict.fromkeys(NODES, share(0.1)) | {NODES[3]: share(0.15)}
    parts = participations(request, node_memories(request), works, {})
    assert [node for node, part in parts.items() if part.is_awaited] == [NODES[3]]


def test_each_exclusion_in_a_row_is_twice_as_long() -> None:
    waits = [
        _part(
            share(1.0), NodeMemory("int4", retries=n), took_ms=0, is_lapsed=True
        ).memory.rests_until_round
        for n in range(6)
    ]
    assert waits == [12, 14, 18, 26, 42, 42]


def test_a_node_on_trial_takes_part_and_nobody_waits_for_it() -> None:
    memory = NodeMemory("int4", rests_until_round=10, retries=1)
    trial = _part(share(1.0), memory, took_ms=None)
    assert trial.is_taking_part
    assert not trial.is_awaited
    assert trial.reason == "on trial after an exclusion; no round waits"


def test_a_node_whose_updates_were_missing_three_times_in_a_row_is_excluded() -> None:
    once = _part(share(1.0), took_ms=0)
    assert once.is_taking_part
    assert not once.is_awaited
    assert not _part(share(1.0), NodeMemory("int4", cut_rounds=2), took_ms=0).is_taking_part


def test_a_lease_over_several_rounds_that_ends_without_its_update_excludes_at_once() -> None:
    exclusion = _part(share(0.1), took_ms=0, is_lapsed=True)
    assert not exclusion.is_taking_part
    assert exclusion.reason == ("excluded: no update in time, 3 in a row; tries again in round #13")


def test_nobody_rests_whom_the_quorum_needs() -> None:
    part = _part(share(0.1), took_ms=0, is_lapsed=True, quorum=1.0)
    assert part.reason == "its updates were missing, needed for the quorum"


def test_a_node_whose_update_comes_is_forgiven() -> None:
    part = _part(share(1.0), NodeMemory("int4", retries=3))
    assert part.is_awaited
    assert (part.memory.retries, part.memory.is_awaited) == (0, True)


def _absent(memory: NodeMemory, rounds: int) -> dict[NodeId, NodeMemory]:
    """Memory of the slow node after it was away for so many plans."""
    memories = {SLOW: memory}
    for number in range(10, 10 + rounds):
        request = replace(
            _request(memories, {}, number=number),
            candidates={node: Slot(slot) for slot, node in enumerate(NODES) if node != SLOW},
        )
        memories = dict(node_memories(request).absentees)
    return memories


def test_a_node_that_is_away_for_long_is_forgotten() -> None:
    excluded_memory = NodeMemory("int4", rests_until_round=12, retries=3)
    assert _absent(excluded_memory, 64)[SLOW].retries == 3
    assert not _absent(excluded_memory, 65)
    assert not _absent(NodeMemory("int4"), 1)


def test_absence_is_counted_anew_each_time() -> None:
    away = NodeMemory("int4", retries=3, away_rounds=60)
    assert node_memories(_request({SLOW: away}, {})).candidates[SLOW].away_rounds == 0


def test_a_node_that_is_lost_in_each_of_its_rounds_is_excluded_when_it_is_back_again() -> None:
    lost_results = {SLOW: NodeResult(PART, Milliseconds(0))}
    memories = {SLOW: NodeMemory("int4")}
    for number in (10, 20, 30):
        request = _request(memories, lost_results, number=number)
        other_candidates = {node: slot for node, slot in request.candidates.items() if node != SLOW}
        memories = dict(node_memories(replace(request, candidates=other_candidates)).absentees)
    back = _request(memories, {}, number=40)
    part = participations(back, node_memories(back), EQUAL, {})[SLOW]
    assert part.reason == "excluded: no update in time, 3 in a row; tries again in round #43"


def test_an_exclusion_outlives_what_was_measured() -> None:
    excluded_memory = NodeMemory("int4", rests_until_round=12, retries=1)
    plan = plan_round(_request({SLOW: excluded_memory}, {}), {}, SIZES)
    assert plan.resting == {SLOW: "excluded for the 1st time in a row; tries again in round #13"}
    assert plan.memory.nodes[SLOW] == excluded_memory


def test_nodes_on_trial_shape_nobody_elses_work_however_good_their_lines_are() -> None:
    five, silent = dict.fromkeys(NODES, Truth()), names(11)[5:]
    readings = {node: reading_of(truth) for node, truth in five.items()}
    fast = reading_of(Truth(up_mbit_s=1000, down_mbit_s=1000, rtt_ms=1))
    probed_readings = dict.fromkeys(
        silent, replace(fast, step_us=Estimate(), forecast_error=Estimate())
    )
    request = _request({}, {})
    alone = plan_round(request, readings, SIZES)
    everybody = {node: Slot(slot) for slot, node in enumerate((*NODES, *silent))}
    beside = replace(request, candidates=everybody, on_trial=frozenset(silent))
    plan = plan_round(beside, readings | probed_readings, SIZES)
    assert set(silent) <= plan.nodes.keys()
    assert {node: plan.nodes[node].inner_steps for node in NODES} == {
        node: part.inner_steps for node, part in alone.nodes.items()
    }


def test_a_plan_names_paused_nodes_with_the_reason() -> None:
    pause_reasons = {NodeId("0xab"): "paused by its owner"}
    plan = plan_round(replace(_request({}, {}), paused=pause_reasons), {}, SIZES)
    assert plan.resting == {"0xab": "paused by its owner"}


def test_exclusions_that_leave_no_quorum_do_not() -> None:
    memories = {
        node: NodeMemory("int4", rests_until_round=12 + slot, retries=1)
        for slot, node in enumerate(NODES)
    }
    plan = plan_round(_request(memories, {}), {}, SIZES)
    assert list(plan.nodes) == list(NODES[:3])


def test_a_plan_without_measurements_keeps_to_the_most_steps_that_the_user_allows() -> None:
    request = _request({SLOW: NodeMemory("int4", inner_steps=400)}, {})
    request = replace(request, spec=spec(nodes=5, aware=Aware(inner_steps_max=10)))
    assert {part.inner_steps for part in plan_round(request, {}, SIZES).nodes.values()} == {10}


def _result(took_ms: int) -> dict[NodeId, NodeResult]:
    """Results of a round in which everybody took part, the slow node for so long; 0: it was cut."""
    took = dict.fromkeys(NODES, 1) | {SLOW: took_ms}
    return {node: NodeResult(PART, Milliseconds(ms)) for node, ms in took.items()}


@pytest.mark.parametrize(
    ("reading", "reason"), [(STARTING, "its worker is starting"), (AWAY, "not connected")]
)
def test_who_could_not_begin_at_once_rests_and_is_back_in_the_next_plan(
    reading: NodeReading, reason: str
) -> None:
    readings = {node: reading_of(Truth()) for node in NODES}
    unready = replace(
        readings[SLOW], is_present=reading.is_present, is_starting=reading.is_starting
    )
    request = _request({}, _result(0))
    rests = plan_round(request, {**readings, SLOW: unready}, SIZES)
    assert rests.resting == {SLOW: f"{reason}"}
    assert set(rests.nodes) == set(NODES[1:])

    results = {node: NodeResult(plan, Milliseconds(1)) for node, plan in rests.nodes.items()}
    later = replace(request, round=11, previous=rests.memory, results=results)
    assert SLOW in plan_round(later, readings, SIZES).nodes


def test_before_anything_is_measured_the_unready_rest_too() -> None:
    readings = {SLOW: STARTING, NODES[1]: AWAY}
    plan = plan_round(_request({}, {}), readings, SIZES)
    assert plan.resting == {
        NODES[1]: "not connected",
        SLOW: "its worker is starting",
    }


def test_a_daemon_that_crashes_each_time_is_excluded_in_the_end() -> None:
    memory = NodeMemory("int4")
    for _ in range(3):
        # It takes part, vanishes, and rests while its worker starts again.
        request = _request({SLOW: memory}, _result(0))
        part = participations(request, node_memories(request), EQUAL, {SLOW: STARTING})
        memory = part[SLOW].memory
        assert part[SLOW].reason == "its worker is starting"
    request = _request({SLOW: memory}, {})
    part = participations(request, node_memories(request), EQUAL, {})
    assert part[SLOW].reason.startswith("excluded: no update in time, 3 in a row")


def test_a_node_that_is_away_is_not_excluded_meanwhile() -> None:
    request = _request({SLOW: NodeMemory("int4", retries=1)}, _result(0))
    memories = node_memories(request)
    part = participations(request, memories, EQUAL, {SLOW: AWAY})[SLOW]
    assert part.memory == NodeMemory("int4", retries=1, cut_rounds=1)
    assert part.reason == "not connected"


def test_for_the_quorum_those_are_asked_back_first_who_are_there_and_the_away_last() -> None:
    readings = {NODES[0]: AWAY, NODES[1]: STARTING}
    missing_memories = {NODES[2]: NodeMemory("int4", cut_rounds=3)}

    def reasons(quorum: float) -> list[str]:
        request = _request(missing_memories, {}, quorum=quorum)
        parts = participations(request, node_memories(request), EQUAL, readings)
        return [part.reason for part in parts.values() if part.is_taking_part and part.reason]

    assert reasons(0.4) == []
    assert reasons(0.6) == ["its updates were missing, needed for the quorum"]
    assert reasons(0.8) == [
        "its worker is starting, needed for the quorum",
        "its updates were missing, needed for the quorum",
    ]
    assert "not connected, needed for the quorum" in reasons(1.0)


def test_an_exclusion_goes_on_while_its_node_is_away() -> None:
    excluded_memory = NodeMemory("int4", rests_until_round=12, retries=1)
    plan = plan_round(_request({SLOW: excluded_memory}, {}), {SLOW: AWAY}, SIZES)
    assert plan.resting == {SLOW: "excluded for the 1st time in a row; tries again in round #13"}


FLEETS = (3, 8, 30)
Updates = npt.NDArray[np.float64]


def _request_of_median(
    agreement: float | None,
    *,
    nodes: int = 8,
    is_sparse: bool = False,
    crowded: int = 0,
    factor: float = 1.0,
) -> PlanRequest:
    job = spec(nodes=nodes)
    part = NodePlan(20, "int4", "", Milliseconds(1), Milliseconds(1))
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
    """What `PlanRequest.agreement` says of such updates."""
    return float(np.square(updates.sum(axis=0)).sum() / np.square(updates).sum())


def _updates(nodes: int, cosine: float, norms: Sequence[float] | None = None) -> Updates:
    """With such a cosine between any two of them, but for what chance adds."""
    dice = np.random.default_rng(nodes)
    shared_part, own = dice.standard_normal(16_384), dice.standard_normal((nodes, 16_384))
    updates: Updates = np.sqrt(cosine) * shared_part + np.sqrt(1 - cosine) * own
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


def _drift(request: PlanRequest, moving_share: float) -> Drift:
    return drift(request, update_agreement(request).cosine, moving_share)


@pytest.mark.parametrize("nodes", FLEETS)
def test_three_rounds_of_updates_that_do_not_agree_halve_the_steps(nodes: int) -> None:
    crowded_median, fair = (1 + share * (nodes - 1) for share in (0.03, 0.06))
    assert _drift(_request_of_median(crowded_median, nodes=nodes, crowded=1), 0.1).factor == 1
    assert _drift(_request_of_median(crowded_median, nodes=nodes, crowded=2), 0.1).factor == 0.5
    assert _drift(_request_of_median(fair, nodes=nodes, crowded=2), 0.1) == Drift()


@pytest.mark.parametrize("nodes", FLEETS)
def test_updates_that_agree_earn_more_steps_where_bytes_take_a_fifth(nodes: int) -> None:
    agreed_median = 1 + 0.3 * (nodes - 1)
    assert _drift(_request_of_median(agreed_median, nodes=nodes), 0.3).factor == 1.25
    assert _drift(_request_of_median(agreed_median, nodes=nodes), 0.1).factor == 1


@pytest.mark.parametrize("nodes", FLEETS)
def test_steps_that_were_halved_grow_back_when_updates_are_orthogonal_no_more(nodes: int) -> None:
    uncrowded_median, fair = (1 + share * (nodes - 1) for share in (0.1, 0.06))
    assert (
        _drift(_request_of_median(uncrowded_median, nodes=nodes, factor=0.5), 0.01).factor == 0.625
    )
    assert _drift(_request_of_median(uncrowded_median, nodes=nodes, factor=0.9), 0.01).factor == 1
    assert _drift(_request_of_median(fair, nodes=nodes, factor=0.5), 0.01).factor == 0.5


def test_updates_that_do_not_agree_take_steps_off_what_the_job_can_be_divided_by() -> None:
    assert wanted_steps(_request_of_median(None), 4000, 100, Drift(0.5))[0] == 50
    assert wanted_steps(_request_of_median(None), 4000, 100, Drift(1.25))[0] == 100


def test_sparse_updates_always_look_as_if_they_did_not_agree() -> None:
    assert _drift(_request_of_median(1.0, is_sparse=True, crowded=2), 0.1).factor == 1


def test_steps_grow_as_the_learning_rate_decays() -> None:
    request = _request_of_median(None)
    assert decay_steps(request) == 0
    decaying_request = replace(request, spec=replace(request.spec, inner=Inner(schedule="cosine")))
    half = replace(decaying_request, samples_done=Samples(request.samples_total // 2))
    assert decay_steps(decaying_request) == 20
    assert decay_steps(half) == 80


def test_computing_is_long_enough_for_the_users_share_of_it() -> None:
    computing_us = computing_for(1_000_000, 100_000, 0.85)
    assert 0.85 < computing_us / (computing_us + 1_000_000) < 0.9


def test_an_upload_that_takes_most_of_the_moving_asks_for_more() -> None:
    assert computing_for(1_000_000, 2_000_000, 0.85) > computing_for(1_000_000, 100_000, 0.85)


def test_the_last_two_rounds_are_of_equal_length() -> None:
    node = NodeId("n0")
    assert fit_steps({node: 100}, {node: 10}, 5000) == {node: 100}
    assert fit_steps({node: 100}, {node: 10}, 1200) == {node: 60}
    assert fit_steps({node: 100}, {node: 10}, 600) == {node: 60}

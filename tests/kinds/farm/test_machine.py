"""What only farm jobs do: bundles by pace, secret comparison, copies at the end, bad items."""

import itertools
from functools import cache

import pytest
from msgspec.structs import replace

from coordinator.core.farm.budget import budget_units
from coordinator.core.farm.bundle_sizes import TRIAL_ITEMS
from coordinator.core.farm.checks import TRIAL_AGREEMENTS, draw, may_take_copy
from coordinator.core.farm.events import (
    BudgetRaised,
    BundleAccepted,
    BundlesDue,
    ItemDropped,
    PartConfirmed,
    ResultDoubted,
)
from coordinator.core.farm.kind import FARM
from coordinator.core.farm.state import CheckRule, FarmPhase
from coordinator.core.farm.transition import LEGAL
from coordinator.core.work import work_events
from coordinator.core.work.work_commands import CancelWork, ReleaseNode
from coordinator.core.work.work_events import JobResumed, NodeLost, StampedEvent
from hypergpu.farm.map_request import MapRequest
from hypergpu.ids import NodeId
from hypergpu.units import Milliseconds, Wei
from hypergpu.work_units import WorkUnit
from tests.kinds.farm.stepped_farm import ANN, BEN, CAT, DAN, Farm
from tests.kinds.farm.walk import (
    created_job,
    hand_back_of,
    join_event,
    result_of,
    settled_items,
    walk,
)

UNCHECKED = {"checked_permille": 0}


RARE_EVENTS = (
    PartConfirmed(at_ms=Milliseconds(0), bundle=0, start=0, items=2, units=4, confirmations=()),
    work_events.JobStopped(at_ms=Milliseconds(0)),
    work_events.FundingChanged(at_ms=Milliseconds(0), funded_units=None),
    BudgetRaised(at_ms=Milliseconds(0), budget=Wei(1)),
    BundlesDue(at_ms=Milliseconds(0)),
)
"""Events that no walk has."""


@cache
def first_events() -> dict[type, StampedEvent]:
    """An event of each kind."""
    walked_events = [event for seed in range(9) for event in walk(seed).journal]
    return {type(event): event for event in reversed((*RARE_EVENTS, *walked_events))}


def test_every_event_has_its_phases() -> None:
    assert set(LEGAL) == set(FARM.events.__args__)


@pytest.mark.parametrize("phase", FarmPhase)
@pytest.mark.parametrize("kind", LEGAL)
def test_an_event_is_refused_with_the_phase_where_it_has_no_place(
    kind: type, phase: FarmPhase
) -> None:
    job = replace(Farm(100, ANN).job, phase=phase)
    reason = FARM.rejection(job, first_events()[kind])
    text = f"job-f is {phase.value} and has no place for {kind.__name__}"
    assert (reason == text) == (phase not in LEGAL[kind])
    if phase not in LEGAL[kind]:
        assert FARM.transition(job, first_events()[kind]).job is job


def test_the_first_bundle_is_small_and_later_ones_take_the_time_that_is_stated() -> None:
    farm = Farm(100_000, ANN, BEN, bundle_ms=20_000, **UNCHECKED)
    assert farm.items_of(ANN) == TRIAL_ITEMS
    farm.return_result(ANN, after_ms=160)
    assert farm.items_of(ANN) == 8 * TRIAL_ITEMS
    farm.return_result(ANN, after_ms=10 * farm.items_of(ANN))
    farm.return_result(ANN, after_ms=10 * farm.items_of(ANN))
    assert farm.items_of(ANN) == pytest.approx(1_000, abs=2)


def test_bundles_become_smaller_as_the_rest_does() -> None:
    farm = Farm(2_000, ANN, **UNCHECKED)
    sizes = []
    while farm.is_in(FarmPhase.WORKING):
        sizes.append(farm.items_of(ANN))
        farm.return_result(ANN, after_ms=100 * farm.items_of(ANN))
    assert sum(sizes) == 2_000
    assert sizes[-1] <= 10
    assert max(sizes) <= 200


def test_a_bundle_never_has_more_items_than_its_chunks_allow() -> None:
    farm = Farm(100_000, ANN, **UNCHECKED)
    for _ in range(6):
        farm.return_result(ANN, after_ms=1)
    assert farm.items_of(ANN) == farm.job.bundle_items_most == 1_000


def test_an_idle_node_gets_a_copy_of_the_slowest_bundle_and_the_first_result_counts() -> None:
    farm = Farm(2 * TRIAL_ITEMS + 1, ANN, BEN, **UNCHECKED)
    farm.return_result(BEN, after_ms=100)
    farm.return_result(BEN, after_ms=100)
    assert farm.job.leases[BEN].bundle == farm.job.leases[ANN].bundle
    farm.return_result(BEN)
    assert [each.node for each in farm.commands if isinstance(each, CancelWork)] == [ANN]
    assert farm.is_in(FarmPhase.FINISHED)
    assert sorted(settled_items(farm.journal)) == list(range(2 * TRIAL_ITEMS + 1))


def test_twins_of_one_bundle_never_share_a_join_token() -> None:
    farm = Farm(1_000)
    farm.happen(join_event(ANN, token="one"))
    farm.happen(join_event(BEN, token="one"))
    farm.happen(join_event(CAT, token="two"))
    for node in itertools.islice(itertools.cycle([ANN, BEN, CAT]), 60):
        for open_bundle in farm.job.bundles.values():
            tokens = [farm.job.members[who].token for who in open_bundle.holders]
            tokens += [result.token for result in open_bundle.results]
            assert open_bundle.copies == 1 or len(tokens) == len(set(tokens))
        if node in farm.job.leases:
            farm.return_result(node)
    assert [each for each in farm.records(BundleAccepted) if each.confirmations]


def test_a_result_of_a_new_node_counts_once_another_one_agrees() -> None:
    farm = Farm(1_000, ANN, BEN, check_rule=CheckRule.COPIES)
    bundle = farm.job.leases[ANN].bundle
    farm.return_result(ANN)
    assert not farm.records(BundleAccepted)
    while farm.job.leases[BEN].bundle != bundle:
        farm.return_result(BEN)
    farm.return_result(BEN)
    record = next(each for each in farm.records(BundleAccepted) if each.bundle == bundle)
    assert (record.node, [each.node for each in record.confirmations]) == (ANN, [BEN])
    assert farm.job.paid_units == 2 * farm.job.units > 0


def test_two_outvote_one_that_nobody_confirmed_which_is_banned_and_not_paid() -> None:
    farm = Farm(2_000, ANN, BEN, CAT)
    for node in itertools.islice(itertools.cycle([ANN, BEN, CAT]), 200):
        if node in farm.job.leases:
            farm.return_result(node, lie="wrong " if node == CAT else "")
        if farm.job.members[CAT].ban:
            break
    assert farm.job.members[CAT].ban == "1 result of it was outvoted"
    assert {each.node for each in farm.records(ResultDoubted)} == {CAT}
    records = farm.records(BundleAccepted)
    paid_nodes = {each.node for each in records}
    paid_nodes |= {who.node for each in records for who in each.confirmations}
    assert CAT not in paid_nodes
    assert CAT not in farm.job.leases


def test_a_banned_node_that_was_to_leave_is_let_go() -> None:
    farm = Farm(2_000, ANN, BEN, CAT)
    leaving_event = work_events.NodeDraining(at_ms=Milliseconds(0), node=CAT, reason="asked for")
    farm.job = replace(
        farm.job, members={**farm.job.members, CAT: replace(farm.job.members[CAT], wrongs=1)}
    )
    farm.return_result(CAT, lie="wrong ")
    bundle = next(number for number, it in farm.job.bundles.items() if it.results)
    farm.happen(leaving_event)
    commands: list[object] = []
    for node in itertools.islice(itertools.cycle([ANN, BEN]), 40):
        if bundle not in farm.job.bundles:
            break
        farm.return_result(node)
        commands += farm.commands
    assert farm.job.members[CAT].ban
    assert [each.node for each in commands if isinstance(each, ReleaseNode)] == [CAT]


def test_a_job_with_one_node_ends_without_comparisons() -> None:
    farm = Farm(100, ANN, checked_permille=1_000)
    while farm.is_in(FarmPhase.WORKING):
        farm.return_result(ANN)
    assert farm.is_in(FarmPhase.FINISHED)
    assert farm.job.paid_units == 100


def test_results_that_nobody_can_decide_wait_for_the_user() -> None:
    farm = Farm(TRIAL_ITEMS, ANN, BEN)
    farm.return_result(ANN)
    farm.return_result(BEN, lie="other ")
    assert farm.is_in(FarmPhase.PAUSED)
    assert "no node by a further join token is there to decide" in farm.job.reason
    farm.happen(JobResumed(at_ms=Milliseconds(0)))
    assert farm.is_in(FarmPhase.FINISHED)
    assert farm.job.paid_units == TRIAL_ITEMS
    assert not farm.records(ResultDoubted)


def test_draws_follow_from_the_secret_alone_and_are_spread_evenly() -> None:
    draws = [draw("secret", bundle) for bundle in range(10_000)]
    assert draws == [draw("secret", bundle) for bundle in range(10_000)]
    assert draws != [draw("another", bundle) for bundle in range(10_000)]
    assert sum(value < 30 for value in draws) == pytest.approx(300, abs=60)


def test_an_item_that_fails_everywhere_is_told_alone_and_the_job_goes_on() -> None:
    farm = Farm(200, ANN, BEN, **UNCHECKED)
    for node in itertools.islice(itertools.cycle([ANN, BEN]), 400):
        if node not in farm.job.leases:
            continue
        run = farm.job.bundles[farm.job.leases[node].bundle].run
        if run.start <= 77 < run.start + run.items:
            farm.happen(hand_back_of(farm.job, node, "the worker died 4 times"))
        else:
            farm.return_result(node)
    assert farm.is_in(FarmPhase.FINISHED)
    (record,) = farm.records(ItemDropped)
    assert record.item == 77
    assert "it failed" in record.reason
    assert "the worker died 4 times" in record.reason
    assert sorted(settled_items(farm.journal)) == list(range(200))


def test_a_node_that_fails_at_everything_loses_no_item() -> None:
    farm = Farm(200, ANN, BEN, **UNCHECKED)
    while farm.is_in(FarmPhase.WORKING):
        if BEN in farm.job.leases:
            farm.happen(hand_back_of(farm.job, BEN, "no disk"))
        else:
            farm.return_result(ANN)
    assert farm.job.members[BEN].refusal == "no disk"
    assert not farm.records(ItemDropped)
    assert farm.job.settled_items == 200


def test_a_bundle_that_took_all_memory_comes_back_as_smaller_ones() -> None:
    farm = Farm(1_000, ANN, **UNCHECKED)
    event = hand_back_of(farm.job, ANN, "out of memory")
    farm.happen(replace(event, lacks_memory=True))
    assert farm.job.members[ANN].items_most == TRIAL_ITEMS // 2
    assert farm.items_of(ANN) == TRIAL_ITEMS // 2


def test_a_node_whose_owner_forbids_the_work_is_given_no_more() -> None:
    farm = Farm(1_000, ANN, BEN, **UNCHECKED)
    event = hand_back_of(farm.job, ANN, "its owner allows no work of kind checksum here")
    farm.happen(replace(event, is_refused=True))
    assert ANN not in farm.job.leases
    assert FARM.pending(farm.job, BEN)


def test_a_lease_whose_time_is_over_ends_and_its_items_go_out_again() -> None:
    farm = Farm(1_000, ANN, lease_limit_ms=60_000, **UNCHECKED)
    early = BundlesDue(at_ms=Milliseconds(farm.job.leases[ANN].due_at_ms - 1))
    assert FARM.rejection(farm.job, early) == "no lease is due"
    farm.happen(early, after_ms=60_000)
    assert [each.node for each in farm.commands if isinstance(each, CancelWork)] == [ANN]
    assert farm.job.members[ANN].standing.missed_in_a_row == 1


def test_results_that_cannot_be_of_the_bundle_are_refused() -> None:
    farm = Farm(1_000, ANN)
    right = result_of(farm.job, ANN)
    for change, reason in (
        ({"items": 7}, "the bundle has 8 items, the result 7 and 0"),
        ({"items": 9, "failures": -1}, "a result has no negative counts"),
        ({"units": 9}, "8 items are so many units, not 9"),
    ):
        event = replace(right, result=replace(right.result, **change))
        assert FARM.rejection(farm.job, event) == reason
    tokens = Farm(1_000, ANN, unit=WorkUnit.TOKENS, units_per_item_most=100)
    right = result_of(tokens.job, ANN)
    for units in (0, 801):
        event = replace(right, result=replace(right.result, units=units))
        assert FARM.rejection(tokens.job, event) == f"{units} tokens: 1 to 800 are possible"


def test_a_budget_bounds_the_job() -> None:
    farm = Farm(1_000, ANN, BEN, unit_price=Wei(1_000), budget=Wei(3_000), checked_permille=0)
    assert budget_units(farm.job) == 300
    while farm.is_in(FarmPhase.WORKING):
        for node in [node for node in (ANN, BEN) if node in farm.job.leases]:
            farm.return_result(node)
            assert farm.job.paid_units <= 300
    assert farm.is_in(FarmPhase.PAUSED)
    paid_units = farm.job.paid_units
    assert farm.job.reason == f"its budget covers 300 items, of which {paid_units} are accepted"


def test_an_escrow_bounds_the_job_until_it_covers_more() -> None:
    farm = Farm(1_000, **UNCHECKED)
    farm.happen(work_events.FundingChanged(at_ms=Milliseconds(0), funded_units=0, reason="empty"))
    farm.happen(join_event(ANN))
    assert farm.is_in(FarmPhase.WORKING)
    text = "waits for money: its escrow covers 0 items, of which 0 are accepted: empty"
    assert farm.job.reason == text
    assert ANN not in farm.job.leases
    farm.happen(work_events.FundingChanged(at_ms=Milliseconds(0), funded_units=1_000))
    assert ANN in farm.job.leases


def test_what_a_lost_node_had_goes_to_another() -> None:
    farm = Farm(1_000, ANN, **UNCHECKED)
    start = farm.job.bundles[farm.job.leases[ANN].bundle].run.start
    farm.happen(NodeLost(at_ms=Milliseconds(0), node=ANN, reason="silent"))
    farm.happen(join_event(BEN))
    assert farm.job.bundles[farm.job.leases[BEN].bundle].run.start == start


def test_a_state_stays_small_whatever_the_number_of_items() -> None:
    farm = Farm(1_000_000, ANN, BEN, **UNCHECKED)
    for node in itertools.islice(itertools.cycle([ANN, BEN]), 500):
        farm.return_result(node, after_ms=10)
    assert len(farm.job.bundles) == len(farm.job.leases) == 2
    assert not farm.job.waiting


@pytest.mark.parametrize("seed", range(60))
def test_no_item_is_lost_or_doubled_whatever_becomes_of_nodes(seed: int) -> None:
    job, journal = walk(seed)
    assert job.phase is FarmPhase.FINISHED
    assert sorted(settled_items(journal)) == list(range(job.request.items))
    assert job.settled_items == job.request.items
    leases = [each.lease for each in journal if isinstance(each, BundleAccepted)]
    assert len(leases) == len(set(leases))


def test_a_request_is_refused_with_the_field_and_what_would_be_right() -> None:
    request = created_job(10).request
    wrong_changes: list[tuple[str, dict[str, object]]] = [
        ("item_kind", {"item_kind": "Embed it"}),
        ("items", {"items": 0}),
        ("files", {"files": {"../weights": request.manifest}}),
        ("units_per_item_most", {"units_per_item_most": 2}),
        ("checked_permille", {"checked_permille": 1_001}),
        ("bundle_ms", {"bundle_ms": 10}),
        ("requirements", {"requirements": ("gpu >> 8GB",)}),
    ]
    for field, change in wrong_changes:
        wrong: MapRequest = replace(request, **change)
        with pytest.raises(Exception, match=f"^REQUEST_INVALID .*{field} of a farm job"):
            wrong.check()


def test_a_node_that_nobody_confirmed_gets_small_bundles_while_another_owner_is_there() -> None:
    farm = Farm(100_000, ANN, BEN)
    for _ in range(3):
        farm.return_result(ANN, after_ms=10)
        assert farm.items_of(ANN) == TRIAL_ITEMS
    alone = Farm(100_000, ANN)
    alone.return_result(ANN, after_ms=10)
    assert alone.items_of(ANN) > TRIAL_ITEMS


def test_results_that_differ_are_decided_by_a_node_that_others_confirmed() -> None:
    farm = Farm(100_000, ANN, BEN, CAT, DAN, check_rule=CheckRule.COPIES)
    members = farm.job.members
    known_members = {
        node: replace(members[node], agreements=TRIAL_AGREEMENTS) for node in (CAT, DAN)
    }
    farm.job = replace(farm.job, members={**members, **known_members})
    bundle = farm.job.leases[ANN].bundle
    (other,) = {who for who in farm.job.bundles[bundle].holders if who != ANN}
    farm.return_result(ANN, lie="one lie ")
    farm.return_result(other, lie="another lie ")
    fresh_nodes = [NodeId(f"node-fresh-{number}") for number in range(3)]
    for node in fresh_nodes:
        farm.happen(join_event(node))
        assert farm.job.leases[node].bundle != bundle
    deciders = [who for who in (CAT, DAN) if who != other]
    assert any(may_take_copy(farm.job, bundle, who) for who in deciders)

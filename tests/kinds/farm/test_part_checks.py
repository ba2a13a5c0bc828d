"""A few items of every bundle are done by another node before the bundle counts."""

import itertools
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from benchmarks.ours.farm.liars import CASES, run_case
from coordinator.core.farm.checks import TRIAL_AGREEMENTS, draw
from coordinator.core.farm.events import (
    BundleAccepted,
    BundlesDue,
    MapCreated,
    PartConfirmed,
    ResultDoubted,
)
from coordinator.core.farm.kind import FARM
from coordinator.core.farm.part_checks import (
    FORGIVING_AGREEMENTS,
    LATE_TRIAL_ITEMS,
    must_wait,
    part_verdict,
)
from coordinator.core.farm.part_results import CompareResults
from coordinator.core.farm.state import CheckRule, FarmJob, FarmPhase
from coordinator.core.work.work_commands import CancelWork
from coordinator.core.work.work_events import JobResumed, NodeLost
from hypergpu.farm.map_request import ResultComparison
from hypergpu.ids import NodeId
from hypergpu.units import Milliseconds, Wei
from tests.kinds.farm.stepped_farm import ANN, BEN, CAT, DAN, Farm
from tests.kinds.farm.walk import created_job, hand_back_of, join_event, settled_items, walk

_NOW = Milliseconds(0)
_ITEM_MS = 20


def confirm(farm: Farm, *nodes: NodeId, **changes: Any) -> None:
    """Have others confirmed some nodes, and let their paces be known."""
    for node in nodes:
        agreements = {"agreements": TRIAL_AGREEMENTS, **changes}
        member = replace(farm.job.members[node], **agreements)
        farm.job = replace(farm.job, members={**farm.job.members, node: member})


def large_bundle(farm: Farm, node: NodeId) -> int:
    """Have nodes work on until one of them has a bundle of hundreds of items; its number."""
    others = [who for who in farm.job.members if who != node]
    for who in itertools.islice(itertools.cycle([node, *others]), 1_000):
        leased_bundle = farm.job.leases.get(node)
        if leased_bundle and not leased_bundle.is_part and farm.items_of(node) >= 200:
            return leased_bundle.bundle
        if who in farm.job.leases:
            farm.return_result(who, after_ms=_ITEM_MS * farm.items_of(who))
    raise AssertionError("no bundle became large")


def checker_of(farm: Farm, bundle: int) -> NodeId:
    """Have nodes work on until one of them does the part of a bundle; that node."""
    for node in itertools.islice(itertools.cycle(farm.job.members), 100):
        if farm.job.bundles[bundle].checkers:
            return farm.job.bundles[bundle].checkers[0]
        if node in farm.job.leases:
            farm.return_result(node, after_ms=10)
    raise AssertionError("nobody does the part")


def work_until_settled(farm: Farm, bundle: int, *nodes: NodeId) -> None:
    """Have nodes return what they have until a bundle is settled."""
    for node in itertools.islice(itertools.cycle(nodes), 100):
        if bundle not in farm.job.bundles:
            return
        if node in farm.job.leases:
            farm.return_result(node, after_ms=10)
    raise AssertionError("the bundle is still open")


def test_a_few_items_of_every_large_bundle_are_done_by_another_node_before_it_counts() -> None:
    farm = Farm(100_000, ANN, BEN)
    bundle = large_bundle(farm, ANN)
    items, part = farm.items_of(ANN), farm.job.bundles[bundle].part
    assert part is not None
    assert part.items in {items * 30 // 1_000, items * 30 // 1_000 + 1}
    farm.return_result(ANN)
    assert not [each for each in farm.records(BundleAccepted) if each.bundle == bundle]
    paid_units = farm.job.paid_units - farm.job.units
    work_until_settled(farm, bundle, BEN, ANN)
    (record,) = (each for each in farm.records(BundleAccepted) if each.bundle == bundle)
    assert record.items == items
    assert [(each.node, each.units) for each in record.confirmations] == [(BEN, part.items)]
    assert farm.job.paid_units - farm.job.units >= paid_units + part.items


def test_the_part_lies_where_the_secret_says_and_of_small_bundles_some_have_none() -> None:
    def parts(secret: str) -> list[tuple[int, int]]:
        job = FARM.transition(None, replace(created_job(10_000), draw_seed=secret)).job
        job = FARM.transition(job, join_event(ANN)).job
        farm = Farm(10_000, ANN)
        farm.job = job
        confirm(farm, ANN)
        found_parts = []
        for _ in range(300):
            run = farm.job.bundles[farm.job.leases[ANN].bundle].run
            part = farm.job.bundles[farm.job.leases[ANN].bundle].part
            found_parts.append((part.start - run.start, part.items) if part else (0, 0))
            farm.return_result(ANN, after_ms=2_500 * run.items)
        return found_parts

    first = parts("one secret")
    assert first == parts("one secret")
    assert first != parts("another secret")
    checked_share = sum(items > 0 for _, items in first) / len(first)
    assert 0.3 < checked_share < 0.7  # eight items: 0.06 x 8
    assert len({start for start, items in first if items}) > 3


def test_who_is_outvoted_on_a_part_is_not_paid_and_all_items_go_out_again() -> None:
    farm = Farm(12_000, ANN, BEN, CAT, DAN)
    bundle = large_bundle(farm, ANN)
    run, part = farm.job.bundles[bundle].run, farm.job.bundles[bundle].part
    assert part is not None
    farm.return_result(ANN, lie="wrong ", after_ms=10)
    work_until_settled(farm, bundle, BEN, CAT, DAN)
    (record,) = farm.records(PartConfirmed)
    assert (record.bundle, record.start, record.items) == (bundle, part.start, part.items)
    assert len(record.confirmations) == 2
    assert ANN not in {each.node for each in record.confirmations}
    assert [each.node for each in farm.records(ResultDoubted)] == [ANN]
    assert farm.job.members[ANN].wrongs == 1
    assert any(each.start == run.start for each in farm.job.waiting) or any(
        each.run.start == run.start for each in farm.job.bundles.values()
    )
    for node in itertools.islice(itertools.cycle([ANN, BEN, CAT, DAN]), 8_000):
        if farm.is_in(FarmPhase.FINISHED):
            break
        if node in farm.job.leases:
            farm.return_result(node, after_ms=_ITEM_MS * farm.items_of(node))
    assert sorted(settled_items(farm.journal)) == list(range(12_000))
    assert bundle not in {each.bundle for each in farm.records(BundleAccepted)}


def test_a_voter_that_is_outvoted_is_not_paid_and_the_bundle_counts() -> None:
    farm = Farm(100_000, ANN, BEN, CAT, DAN)
    bundle = large_bundle(farm, ANN)
    confirm(farm, BEN, CAT, DAN)
    farm.return_result(ANN, after_ms=10)
    farm.return_result(BEN, after_ms=10)
    assert farm.job.leases[BEN].is_part
    farm.return_result(BEN, lie="wrong ", after_ms=10)
    work_until_settled(farm, bundle, CAT, DAN)
    record = next(each for each in farm.records(BundleAccepted) if each.bundle == bundle)
    assert BEN not in {record.node, *(each.node for each in record.confirmations)}
    assert [each.node for each in farm.records(ResultDoubted)] == [BEN]


def test_after_a_doubt_bundles_are_small_until_others_have_confirmed_many() -> None:
    farm = Farm(100_000, ANN, BEN)
    large_bundle(farm, ANN)
    confirm(farm, ANN, wrongs=1, agreements=0)
    farm.return_result(ANN, after_ms=10)
    while farm.job.leases[ANN].is_part:
        farm.return_result(ANN, after_ms=10)
    assert farm.items_of(ANN) == 8
    confirm(farm, ANN, wrongs=1, agreements=FORGIVING_AGREEMENTS - 1)
    while farm.job.members[ANN].wrongs:
        for node in (ANN, BEN):
            farm.return_result(node, after_ms=10)


def test_names_that_nobody_confirmed_do_not_vote_while_others_can() -> None:
    farm = Farm(100_000, ANN, BEN, CAT, DAN)
    large_bundle(farm, ANN)
    confirm(farm, BEN)
    for node in (CAT, DAN):
        confirm(farm, node, agreements=0)
    farm.return_result(ANN, after_ms=10)
    for node in (CAT, DAN, CAT, DAN):
        farm.return_result(node, after_ms=10)
        assert not farm.job.leases[node].is_part
    farm.return_result(BEN, after_ms=10)
    assert farm.job.leases[BEN].is_part


def test_late_names_wait_once_they_have_cost_their_share() -> None:
    farm = Farm(100_000, ANN, BEN, CAT)
    large_bundle(farm, ANN)
    confirm(farm, ANN, BEN, CAT)
    waiting_nodes = []
    for number in range(60):
        node = NodeId(f"node-late-{number}")
        farm.happen(join_event(node), after_ms=10)
        if node in farm.job.leases:
            assert farm.items_of(node) == LATE_TRIAL_ITEMS
        else:
            waiting_nodes.append(node)
    assert waiting_nodes
    assert all(must_wait(farm.job, node) for node in waiting_nodes)
    for node in (ANN, BEN, CAT):
        farm.happen(NodeLost(at_ms=_NOW, node=node, reason="silent"))
    assert not must_wait(farm.job, waiting_nodes[0])
    assert waiting_nodes[0] in farm.job.leases


def test_a_part_that_comes_back_undone_goes_to_others_and_counts_against_no_item() -> None:
    farm = Farm(100_000, ANN, BEN, CAT)
    bundle = large_bundle(farm, ANN)
    confirm(farm, BEN, CAT)
    farm.return_result(ANN, after_ms=10)
    first = checker_of(farm, bundle)
    farm.happen(hand_back_of(farm.job, first))
    assert not farm.job.bundles[bundle].run.failed_nodes
    assert farm.job.leases[first].bundle != bundle
    second = checker_of(farm, bundle)
    assert {first, second} == {BEN, CAT}
    due_ms = farm.job.leases[second].due_at_ms
    farm.happen(BundlesDue(at_ms=_NOW), after_ms=due_ms - farm.job.at_ms)
    # Nobody is left that could do it: the result counts as it is.
    assert bundle not in farm.job.bundles
    assert bundle in {each.bundle for each in farm.records(BundleAccepted)}


def test_a_node_that_is_lost_while_it_votes_leaves_the_part_to_others() -> None:
    farm = Farm(100_000, ANN, BEN, CAT)
    bundle = large_bundle(farm, ANN)
    confirm(farm, BEN, CAT)
    farm.return_result(ANN, after_ms=10)
    first = checker_of(farm, bundle)
    farm.happen(NodeLost(at_ms=_NOW, node=first, reason="silent"))
    assert [each.node for each in farm.commands if isinstance(each, CancelWork)] == [first]
    assert {first, checker_of(farm, bundle)} == {BEN, CAT}


@pytest.mark.parametrize("better", [ANN, BEN])
def test_a_part_that_nobody_can_decide_waits_for_the_user(better: NodeId) -> None:
    farm = Farm(8, ANN, BEN)
    farm.return_result(ANN)
    assert farm.job.leases[BEN].is_part
    farm.return_result(BEN, lie="other ")
    assert farm.is_in(FarmPhase.PAUSED)
    assert "no node by a further join token is there to decide" in farm.job.reason
    confirm(farm, better)
    farm.happen(JobResumed(at_ms=_NOW))
    assert not farm.records(ResultDoubted)
    if better is ANN:
        assert farm.is_in(FarmPhase.FINISHED)
        assert farm.job.paid_units == 8
    else:
        # The voter is believed: the items are its own now.
        assert farm.items_of(BEN) == 8
        assert not farm.job.leases[BEN].is_part


def test_a_budget_covers_the_parts_too() -> None:
    farm = Farm(1_000, ANN, BEN, unit_price=Wei(1_000), budget=Wei(3_000))
    for node in itertools.islice(itertools.cycle((ANN, BEN)), 2_000):
        if not farm.is_in(FarmPhase.WORKING):
            break
        if node in farm.job.leases:
            farm.return_result(node, after_ms=_ITEM_MS * farm.items_of(node))
            assert farm.job.paid_units <= 300
    assert farm.is_in(FarmPhase.PAUSED)
    assert farm.job.reason.startswith("its budget covers 300 items, of which ")
    assert farm.job.paid_units >= 290


def test_where_single_items_may_differ_two_are_compared_at_least() -> None:
    comparison = ResultComparison(agreeing_permille=990)
    farm = Farm(10_000, ANN, BEN, comparison=comparison)
    confirm(farm, ANN, BEN)
    sizes = set()
    for node in itertools.islice(itertools.cycle((ANN, BEN)), 200):
        if node in farm.job.leases:
            part = farm.job.bundles[farm.job.leases[node].bundle].part
            sizes.add(part.items if part else 0)
            farm.return_result(node, after_ms=500 * farm.items_of(node))
    assert 1 not in sizes
    assert 2 in sizes


def decided_bundles(job: FarmJob) -> list[int]:
    """Bundles whose votes decide, and which are open all the same."""
    return [
        number
        for number, open_bundle in job.bundles.items()
        if open_bundle.part is not None
        and open_bundle.results
        and not open_bundle.comparing
        and part_verdict(job, number).group
    ]


@pytest.mark.parametrize("seed", range(20))
def test_no_bundle_stays_open_whose_votes_decide(seed: int) -> None:
    job: FarmJob | None = None
    for event in walk(seed).journal:
        job = FARM.transition(job, event).job
        assert not decided_bundles(job), event


def test_votes_decide_once_their_nodes_are_confirmed_elsewhere() -> None:
    figures = run_case(CASES["always"], 20_000, seed=2)
    assert figures.phase == "finished"


def test_a_job_of_an_earlier_version_goes_on_by_whole_copies() -> None:
    row = msgspec.json.decode(msgspec.json.encode(created_job(1_000)))
    del row["check_rule"]
    first = msgspec.convert(row, MapCreated)
    assert first.check_rule is CheckRule.COPIES
    farm = Farm(1_000)
    farm.job = FARM.transition(None, first).job
    for node in (ANN, BEN):
        farm.happen(join_event(node))
    assert farm.job.leases[ANN].bundle == farm.job.leases[BEN].bundle
    farm.return_result(ANN)
    farm.return_result(BEN)
    assert not any(isinstance(each, CompareResults) for each in farm.commands)
    assert farm.records(BundleAccepted)[0].confirmations
    assert 0 <= draw("secret", 0) < 1_000

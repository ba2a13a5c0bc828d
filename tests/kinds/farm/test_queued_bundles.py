"""A node that has one bundle gets its next one, and gives it back first."""

import pytest
from msgspec.structs import replace

from coordinator.core.farm.bundle_sizes import TRIAL_ITEMS
from coordinator.core.farm.events import BundlesDue
from coordinator.core.farm.kind import FARM
from coordinator.core.farm.state import FarmPhase, LeasedBundle
from coordinator.core.work import work_events
from coordinator.core.work.work_commands import AssignWork, CancelWork
from coordinator.core.work.work_events import JobPaused, NodeDraining, NodeLost, NodePaused
from hypergpu.ids import NodeId
from hypergpu.units import Milliseconds
from tests.kinds.farm.stepped_farm import ANN, BEN, Farm
from tests.kinds.farm.walk import hand_back_of, join_event, result_of, settled_items

NOW = Milliseconds(0)


def farm_with_queue(items: int = 10_000, **request: int) -> Farm:
    """A job one of whose nodes, Ann, has a bundle and its next one."""
    farm = Farm(
        items, ANN, queues_work=True, **{"checked_permille": 0, "bundle_ms": 1_000, **request}
    )
    farm.return_result(ANN, after_ms=80)
    farm.return_result(ANN, after_ms=640)
    assert ANN in farm.job.queued_leases
    return farm


def both_leases(farm: Farm) -> tuple[LeasedBundle, LeasedBundle]:
    """What Ann does, and what she does next."""
    return farm.job.leases[ANN], farm.job.queued_leases[ANN]


def cancelled_leases(farm: Farm) -> list[int]:
    """Leases of which their nodes were told that they are void, in order."""
    return [each.lease.number for each in farm.commands if isinstance(each, CancelWork)]


def waiting_starts(farm: Farm) -> list[int]:
    """Where the runs begin that wait, in the order in which they go out."""
    return [run.start for run in farm.job.waiting]


def test_a_known_node_is_told_its_next_bundle_and_what_it_comes_after() -> None:
    farm = farm_with_queue()
    first, second = both_leases(farm)
    assignments = [each.assignment for each in farm.commands if isinstance(each, AssignWork)]
    assert [each.lease.number for each in assignments] == [second.lease]
    assert assignments[0].after_lease == first.lease
    pending_leases = [each.lease for each in FARM.pending(farm.job, ANN)]
    assert pending_leases == [first.lease, second.lease]


def test_a_node_that_does_not_say_that_it_queues_work_has_one_bundle() -> None:
    farm = Farm(10_000, ANN, checked_permille=0, bundle_ms=1_000)
    for _ in range(6):
        farm.return_result(ANN, after_ms=100)
        assert not farm.job.queued_leases


def test_a_node_on_trial_has_one_bundle() -> None:
    farm = Farm(10_000, ANN, BEN, queues_work=True, bundle_ms=1_000)
    farm.return_result(ANN, after_ms=80)
    farm.return_result(ANN, after_ms=80)
    assert farm.items_of(ANN) <= TRIAL_ITEMS
    assert not farm.job.queued_leases


def test_the_time_of_the_next_bundle_begins_when_it_is_the_first() -> None:
    farm = farm_with_queue()
    _, second = both_leases(farm)
    farm.return_result(ANN, after_ms=5_000)
    begun_lease = farm.job.leases[ANN]
    assert begun_lease.lease == second.lease
    assert begun_lease.assigned_at_ms == farm.job.at_ms
    assert begun_lease.due_at_ms - begun_lease.assigned_at_ms == (
        second.due_at_ms - second.assigned_at_ms
    )
    farm.return_result(ANN, after_ms=700)
    assert farm.job.members[ANN].pace.took_ms == 700


def test_what_is_assigned_stays_the_same_once_it_is_the_first() -> None:
    farm = farm_with_queue()
    queued_work = FARM.pending(farm.job, ANN)[1].command.assignment.work
    farm.return_result(ANN)
    begun_assignment = FARM.pending(farm.job, ANN)[0].command.assignment
    assert begun_assignment.work == queued_work
    assert begun_assignment.after_lease == 0


def test_near_the_end_no_node_has_a_second_bundle() -> None:
    farm = Farm(600, ANN, queues_work=True, checked_permille=0, bundle_ms=1_000)
    had_queue = False
    while farm.is_in(FarmPhase.WORKING):
        had_queue |= bool(farm.job.queued_leases)
        if farm.job.untouched_items < 40:
            assert len(FARM.pending(farm.job, ANN)) <= 2
        farm.return_result(ANN, after_ms=10 * farm.items_of(ANN))
        if not farm.job.untouched_items and farm.is_in(FarmPhase.WORKING):
            assert not farm.job.queued_leases
    assert had_queue
    assert sorted(settled_items(farm.journal)) == list(range(600))


def test_a_node_that_drains_gives_its_next_bundle_back_and_finishes_the_first() -> None:
    farm = farm_with_queue()
    first, second = both_leases(farm)
    run = farm.job.bundles[second.bundle].run
    farm.happen(NodeDraining(at_ms=NOW, node=ANN, reason="asked for"))
    assert cancelled_leases(farm) == [second.lease]
    assert waiting_starts(farm) == [run.start]
    assert not farm.job.waiting[0].failed_nodes
    assert [each.lease for each in FARM.pending(farm.job, ANN)] == [first.lease]
    farm.return_result(ANN)
    assert not farm.job.members[ANN].is_present
    assert not FARM.pending(farm.job, ANN)


@pytest.mark.parametrize(
    "event",
    [
        NodeLost(at_ms=NOW, node=ANN, reason="silent"),
        NodePaused(at_ms=NOW, node=ANN, reason="by its owner"),
        JobPaused(at_ms=NOW),
    ],
)
def test_both_bundles_wait_again_once_their_node_is_gone(
    event: work_events.StampedEvent,
) -> None:
    farm = farm_with_queue()
    first, second = both_leases(farm)
    starts = [farm.job.bundles[each.bundle].run.start for each in (first, second)]
    results = [result_of(farm.job, ANN, place=place) for place in (0, 1)]
    farm.happen(event)
    assert cancelled_leases(farm) == [second.lease, first.lease]
    assert waiting_starts(farm) == starts
    assert all(FARM.rejection(farm.job, result) for result in results)


def test_of_a_node_that_is_late_only_the_first_bundle_counts_as_failed() -> None:
    farm = farm_with_queue()
    first, second = both_leases(farm)
    second_run = farm.job.bundles[second.bundle].run
    farm.happen(join_event(BEN))
    late_ms = first.due_at_ms - farm.job.at_ms
    farm.happen(BundlesDue(at_ms=NOW), after_ms=late_ms)
    assert cancelled_leases(farm)[:2] == [second.lease, first.lease]
    runs = [*farm.job.waiting, *(each.run for each in farm.job.bundles.values())]
    assert all(not run.failed_nodes for run in runs if run.start == second_run.start)
    assert any(run.failed_nodes == (ANN,) for run in runs)


def test_a_node_that_lacks_memory_has_its_next_bundle_made_anew() -> None:
    farm = farm_with_queue()
    first, second = both_leases(farm)
    items = farm.items_of(ANN)
    event = hand_back_of(farm.job, ANN, "out of memory")
    farm.happen(replace(event, lacks_memory=True))
    assert second.lease in cancelled_leases(farm)
    assert all(farm.job.leased_run(each).items <= items // 2 for each in farm.job.leases_of(ANN))
    assert farm.job.leases[ANN].lease > second.lease > first.lease


def test_a_node_that_hands_the_first_bundle_back_goes_on_with_the_next() -> None:
    farm = farm_with_queue()
    _, second = both_leases(farm)
    farm.happen(hand_back_of(farm.job, ANN))
    assert farm.job.leases[ANN].lease == second.lease
    assert second.lease not in cancelled_leases(farm)


def test_the_next_bundle_may_be_handed_back_alone() -> None:
    farm = farm_with_queue()
    first, second = both_leases(farm)
    farm.happen(hand_back_of(farm.job, ANN, place=1))
    assert farm.job.leases[ANN] == first
    assert all(each.lease != second.lease for each in farm.job.leases_of(ANN))


def test_a_result_counts_by_its_lease_whichever_comes_first() -> None:
    farm = farm_with_queue()
    first, second = both_leases(farm)
    late_result, early_result = (result_of(farm.job, ANN, place=place) for place in (0, 1))
    farm.happen(early_result)
    assert farm.job.leases[ANN] == first
    assert FARM.rejection(farm.job, early_result)
    farm.happen(late_result)
    assert {first.lease, second.lease} & {each.lease for _, each in farm.job.all_leases()} == set()


def test_an_idle_node_gets_a_copy_of_what_another_has_yet_to_begin() -> None:
    farm = farm_with_queue()
    _, second = both_leases(farm)
    farm.happen(join_event(BEN))
    while farm.job.has_work_left:
        farm.return_result(BEN, after_ms=1)
    farm.return_result(BEN, after_ms=1)
    assert farm.job.leases[BEN].bundle == second.bundle
    farm.return_result(BEN, after_ms=1)
    assert second.lease in cancelled_leases(farm)
    farm.return_result(BEN, after_ms=1)
    assert farm.is_in(FarmPhase.FINISHED)
    assert sorted(settled_items(farm.journal)) == list(range(10_000))


def test_who_is_confirmed_does_votes_beside_a_bundle() -> None:
    nodes = [NodeId(f"node-{number}") for number in range(3)]
    farm = Farm(20_000, *nodes, queues_work=True, bundle_ms=1_000)
    part_beside_bundle = False
    for turn in range(240):
        node = nodes[turn % 3]
        if farm.job.leases_of(node):
            farm.return_result(node, after_ms=100)
        part_beside_bundle |= any(each.is_part for each in farm.job.queued_leases.values())
    assert part_beside_bundle
    assert len(set(settled_items(farm.journal))) == farm.job.settled_items

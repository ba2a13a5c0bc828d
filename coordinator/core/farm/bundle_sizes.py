"""How many items a node is given at once: what it does in the time that a bundle is to take.

A node's pace is that of its newest bundle, with its line: short bundles are slowed by what each of
them costs at least, so that sizes grow by at most eight times from one bundle to the next. Towards
the end a bundle is at most half of the node's share of what is left, so that all end together.
"""

from coordinator.core.farm.checks import is_on_trial
from coordinator.core.farm.part_checks import LATE_TRIAL_ITEMS
from coordinator.core.farm.state import FarmJob, FarmMember
from hypergpu.ids import NodeId
from hypergpu.units import Milliseconds

TRIAL_ITEMS = 8
"""Items of a node's first bundles, whose results are always compared where that can be."""
_GROWTH = 8
_HOUR_MS = 3_600_000
_FAR_FROM_THE_END = 16
"""Bundles that are left for each member where no share is looked at: a member that is 8 times as
slow as the mean has two of its own left.
"""
_LEAST_MS = Milliseconds(1_000)
"""A bundle takes at least so long, unless little is left: each one costs a lease and rows."""
LIMIT_TIMES = 4
"""A lease lasts so many times what the bundle is expected to take."""
LIMIT_LEAST_MS = Milliseconds(60_000)


def bundle_items(job: FarmJob, node: NodeId, left_items: int) -> int:
    """Items of a node's next bundle, at least 1.

    Args:
        job: The job.
        node: A member that is there.
        left_items: Items of the run that it is cut from; never more.
    """
    member = job.members[node]
    most_items = min(
        left_items,
        job.bundle_items_most,
        job.request.bundle_items_most or left_items,
        member.items_most or left_items,
    )
    if is_on_trial(job, node):
        most_items = min(most_items, _trial_items(member))
    return max(1, min(most_items, _paced_items(job, member, most_items)))


def _trial_items(member: FarmMember) -> int:
    """A name that comes when others are known shows first that it can do anything at all."""
    return LATE_TRIAL_ITEMS if member.is_late and not member.agreements else TRIAL_ITEMS


def _paced_items(job: FarmJob, member: FarmMember, most_items: int) -> int:
    pace = member.pace
    if not pace.items:
        return TRIAL_ITEMS
    by_time = _items_by_time(job, member)
    if _is_far(job, min(by_time, most_items)):
        # No need to look at every member.
        return by_time
    share = _share_items(job, member) // 2
    return min(by_time, max(share, pace.items_in(_LEAST_MS)))


def is_far_from_end(job: FarmJob, node: NodeId) -> bool:
    """Whether a node's next bundle would be of its full size, which its share does not cut."""
    member = job.members[node]
    by_time = _items_by_time(job, member)
    most_items = min(by_time, job.bundle_items_most, job.request.bundle_items_most or by_time)
    if not by_time:
        return False
    if _is_far(job, most_items):
        return True
    return _share_items(job, member) // 2 >= most_items


def _items_by_time(job: FarmJob, member: FarmMember) -> int:
    """Items of a bundle by its time alone; 0: the node has returned none."""
    return min(member.pace.items_in(job.request.bundle_ms), _GROWTH * member.pace.items)


def _is_far(job: FarmJob, items: int) -> bool:
    return _FAR_FROM_THE_END * len(job.members) * items <= job.untouched_items


def _share_items(job: FarmJob, member: FarmMember) -> int:
    """The node's share of all that is not given out, by its pace."""
    left_items = job.untouched_items + sum(run.items for run in job.waiting)
    # Asked at every result near the end, for each member: no call within.
    speeds = sum(
        pace.items * _HOUR_MS // max(1, pace.took_ms)
        for each in job.members.values()
        if each.is_present and (pace := each.pace).items and not each.exclusion
    )
    return left_items * _items_per_hour(member) // max(1, speeds)


def _items_per_hour(member: FarmMember) -> int:
    return member.pace.items_in(_HOUR_MS)


def lease_limit_ms(job: FarmJob, node: NodeId, items: int) -> Milliseconds:
    """How long a node may keep a bundle of so many items."""
    expected_ms = job.members[node].pace.span_for(items)
    most_ms = job.request.lease_limit_ms
    if not expected_ms:
        return most_ms
    return Milliseconds(min(most_ms, max(LIMIT_LEAST_MS, LIMIT_TIMES * expected_ms)))

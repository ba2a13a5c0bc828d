"""A few items of every bundle are done by another node, and compared before the bundle counts.

Which items follows from the job's secret and the bundle's number. Of what a known node does they
are the share that the job states, one at least; a bundle so small that one item would be more than
twice the share is checked by draw. Of new and outvoted nodes it is a quarter of a small bundle. The
nodes that do the part are its *voters*; the bundle's own result is a claim among their votes.

A vote of a node that others confirmed weighs three, any other one, a banned node's nothing. A claim
is decided on once it leads by four where confirmed nodes are there, by three among names that
nobody confirmed. A node that is wrong in a few items of a bundle is found by chance alone.
"""

from collections.abc import Iterable
from typing import NamedTuple

from coordinator.core.farm.checks import (
    TRIAL_AGREEMENTS,
    Strangers,
    draw,
    is_anybody_confirmed,
    is_confirmed,
    is_stranger,
    strangers_to,
)
from coordinator.core.farm.state import (
    CheckRule,
    FarmJob,
    FarmMember,
    ItemRun,
    OpenBundle,
    ReturnedResult,
)
from hypergpu.digests import digest_of
from hypergpu.ids import NodeId

VOTES_MOST = 5
"""Votes after which the leading claim counts, whatever its lead."""
FORGIVING_AGREEMENTS = 16
"""Confirmed results in a row after which a node that was outvoted once is as good as any."""
LATE_TRIAL_ITEMS = 2
"""Items of the first bundles of a name that comes when others are known."""
_CONFIRMED_WEIGHT, _CONFIRMED_LEAD, _NEW_LEAD = 3, 4, 3
_PERMILLE = 1_000
_DOUBTED_SHARE, _DOUBTED_LEAST = 4, 2
_LATE_FREE_ITEMS, _LATE_SHARE = 32, 200


def drawn_part(job: FarmJob, node: NodeId, number: int, run: ItemRun) -> ItemRun | None:
    """The items of a bundle that another node does too; None: none of them.

    Args:
        job: The job.
        node: Who gets the bundle.
        number: Number of the bundle.
        run: Its items.
    """
    if job.check_rule is not CheckRule.PARTS or not job.request.checked_permille:
        return None
    items = min(run.items, _part_items(job, job.members[node], number, run.items))
    if not items:
        return None
    first = int(digest_of(f"part/{job.draw_seed}/{number}".encode())[:15], 16)
    return ItemRun(start=run.start + first % (run.items - items + 1), items=items)


def _part_items(job: FarmJob, member: FarmMember, number: int, items: int) -> int:
    whole, rest = divmod(items * job.request.checked_permille, _PERMILLE)
    if not is_confirmed(member):
        return max(whole, _DOUBTED_LEAST, items // _DOUBTED_SHARE)
    # Where single items may differ, one that does must not decide.
    least = 1 if job.request.comparison.agreeing_permille == _PERMILLE else 2
    chance = draw(job.draw_seed, number)
    if whole >= least:
        return whole + (chance < rest)
    return least if chance * least < 2 * items * job.request.checked_permille else 0


def bundle_with_part_items(job: FarmJob, items: int) -> int:
    """Items of a bundle that has so many with its part, whoever gets it."""
    if job.check_rule is not CheckRule.PARTS or not job.request.checked_permille:
        return items
    part_permille = max(_PERMILLE // _DOUBTED_SHARE, job.request.checked_permille)
    return (items - _DOUBTED_LEAST) * _PERMILLE // (_PERMILLE + part_permille)


class Verdict(NamedTuple):
    """What the votes on a bundle's part say."""

    group: tuple[ReturnedResult, ...] = ()
    """Results that count together; empty: that is open."""
    missing_votes: int = 0
    """Votes for which no node has a lease yet, and one may get it."""
    is_hopeless: bool = False
    """Whether so many votes are in that no further one would help."""


def part_verdict(job: FarmJob, number: int) -> Verdict:
    """Count the votes on a bundle whose own result is in, and whose votes are all compared."""
    open_bundle = job.bundles[number]
    claims = sorted(
        _claims(open_bundle), key=lambda claim: _weight(job, claim, open_bundle), reverse=True
    )
    weights = [_weight(job, claim, open_bundle) for claim in claims]
    lead = weights[0] - (weights[1] if len(weights) > 1 else 0)
    is_known, is_open = _open_voters(job, number)
    is_known = is_known or any(is_confirmed(job.members[who]) for who in open_bundle.checkers)
    needed_lead = _CONFIRMED_LEAD if is_known else _NEW_LEAD
    is_last = not is_open and not open_bundle.checkers
    is_full = len(open_bundle.votes) >= VOTES_MOST
    if lead >= needed_lead or (is_last and not open_bundle.votes):
        return Verdict(claims[0])
    if is_last or is_full:
        return Verdict(claims[0]) if lead and len(claims[0]) > 1 else Verdict((), 0, is_full)
    votes = -(-(needed_lead - lead) // (_CONFIRMED_WEIGHT if is_known else 1))
    return Verdict((), max(0, votes - len(open_bundle.checkers)) if is_open else 0)


def _open_voters(job: FarmJob, number: int) -> tuple[bool, bool]:
    """Whether a node is there that others confirmed and that may vote on a bundle, and whether any
    is.
    """
    strangers = strangers_to(job, number)
    is_open = False
    for node, member in job.members.items():
        if member.can_work and strangers.has(node, member):
            if is_confirmed(member):
                return True, True
            is_open = True
    return False, is_open


def _claims(open_bundle: OpenBundle) -> list[tuple[ReturnedResult, ...]]:
    """Results that agree, directly or by others, each group in the order of its results."""
    claims: list[list[ReturnedResult]] = [[open_bundle.results[0]]]
    for vote in open_bundle.votes:
        like_leases = vote.agreeing or ()
        like = [claim for claim in claims if any(each.lease in like_leases for each in claim)]
        claims = [
            *(claim for claim in claims if claim not in like),
            [*(each for claim in like for each in claim), vote.result],
        ]
    return [tuple(claim) for claim in claims]


def _weight(job: FarmJob, claim: Iterable[ReturnedResult], open_bundle: OpenBundle) -> int:
    """Weight of a claim. The bundle's own node vouches for nothing, however well it is known."""
    own_lease = open_bundle.results[0].lease
    return sum(
        1 if each.lease == own_lease else _vote_weight(job.members[each.node]) for each in claim
    )


def _vote_weight(member: FarmMember) -> int:
    if member.ban:
        return 0
    return _CONFIRMED_WEIGHT if is_confirmed(member) else 1


def bundles_to_check(job: FarmJob) -> list[int]:
    """Bundles that may want votes: their own results are in, and nothing is being compared."""
    return [
        number
        for number, open_bundle in job.bundles.items()
        if open_bundle.part is not None and open_bundle.results and not open_bundle.comparing
    ]


class _VoteWish(NamedTuple):
    """What a bundle wants of a node that is free."""

    is_wanted: bool
    strangers: Strangers
    is_known: bool
    """Whether a node that others confirmed may give it."""


class WantedVotes:
    """Votes that some bundles want, while nodes are given work: each bundle is looked at once.

    Args:
        numbers: Bundles that may want votes, in order.
    """

    def __init__(self, numbers: Iterable[int]) -> None:
        self._numbers = [*numbers]
        self._wishes: dict[int, _VoteWish] = {}

    def first_for(self, job: FarmJob, node: NodeId) -> int | None:
        """The first bundle whose part a node should do now; None: there is none."""
        member = job.members[node]
        for number in self._numbers:
            wish = self._wish(job, number)
            if not wish.is_wanted or not wish.strangers.has(node, member):
                continue
            # Names that nobody confirmed decide nothing while others can.
            if is_confirmed(member) or not wish.is_known:
                return number
        return None

    def review(self, number: int) -> None:
        """Look at a bundle again: a node was given its part."""
        self._wishes.pop(number, None)

    def _wish(self, job: FarmJob, number: int) -> _VoteWish:
        if number not in self._wishes:
            is_wanted = part_verdict(job, number).missing_votes > 0
            is_known = is_wanted and _open_voters(job, number)[0]
            self._wishes[number] = _VoteWish(is_wanted, strangers_to(job, number), is_known)
        return self._wishes[number]


def is_part_undecided(job: FarmJob, number: int) -> bool:
    """Whether votes on a bundle differ and no node of the job, there or not, can decide."""
    open_bundle = job.bundles[number]
    if not open_bundle.votes or open_bundle.comparing or open_bundle.checkers:
        return False
    return not part_verdict(job, number).group and not any(
        is_stranger(job, number, node) and not member.ban for node, member in job.members.items()
    )


def must_wait(job: FarmJob, node: NodeId) -> bool:
    """Whether a name that came late waits, as such names have cost the job enough for now.

    A name costs nothing to make. What late ones had done for nothing, and what those that are at
    work may yet cost, stays within half a hundredth of what is settled.
    """
    member = job.members[node]
    if not _is_late_trial(job, member) or not is_anybody_confirmed(job):
        return False
    at_risk = sum(
        _cost_items(open_bundle)
        for open_bundle in job.bundles.values()
        if any(_is_late_trial(job, job.members[who]) for who in _claimants(open_bundle))
    )
    free_items = _LATE_FREE_ITEMS + job.settled_items // _LATE_SHARE
    return job.late_cost_items + at_risk + LATE_TRIAL_ITEMS > free_items


def _is_late_trial(job: FarmJob, member: FarmMember) -> bool:
    return (
        job.check_rule is CheckRule.PARTS
        and bool(job.request.checked_permille)
        and member.is_late
        and not member.wrongs
        and member.agreements < TRIAL_AGREEMENTS
    )


def _claimants(open_bundle: OpenBundle) -> tuple[NodeId, ...]:
    return (*open_bundle.holders, *(result.node for result in open_bundle.results))


def _cost_items(open_bundle: OpenBundle) -> int:
    """Items that are done for nothing where a bundle's result is outvoted: its own, and two votes,
    of which the items that are done again need none.
    """
    return open_bundle.run.items + (2 * open_bundle.part.items if open_bundle.part else 0)


def late_cost(job: FarmJob, number: int, node: NodeId) -> int:
    """What a wrong result of a node for a bundle cost, where it counts against late names."""
    if not _is_late_trial(job, job.members[node]):
        return 0
    open_bundle = job.bundles[number]
    if any(result.node == node for result in open_bundle.results):
        return _cost_items(open_bundle)
    return open_bundle.part.items if open_bundle.part else 0

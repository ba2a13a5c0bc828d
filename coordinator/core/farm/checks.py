"""Which bundles are done twice in secret, by whom, and what follows from the comparison: whole
copies of a share of the bundles, the rule of jobs of earlier versions. `part_checks` has the newer
one, and shares what is said here of nodes.

A bundle's draw is a digest of the job's secret and the bundle's number: nobody who has not the
secret knows it, and every replay draws the same. A node's first bundles are small and are always
compared, so that trust costs little; a node that was outvoted is compared every second time, and is
banned the second time. Twins never share a join token or an address. Where no other node is there,
a result counts without a comparison: a job with one node must end.
"""

from typing import NamedTuple

from coordinator.core.farm.state import CheckRule, FarmJob, FarmMember, OpenBundle
from hypergpu.digests import digest_of
from hypergpu.farm.bundles import BundleResult
from hypergpu.farm.map_request import ComparisonRule
from hypergpu.ids import NodeId

TRIAL_AGREEMENTS = 2
"""Comparisons that a node passes before its bundles are checked by draw."""
QUEUE_AGREEMENTS = 8
"""Confirmed results, since it was outvoted, with which a node has two bundles at a time."""
DOUBTED_PERMILLE = 500
WRONGS_MOST = 2
"""Outvoted results for which a node is banned."""
_DISPUTE = 2
"""Results of one bundle of which no two agree."""
COPIES_MOST = 5
"""Results of one bundle of which no two agree: then the comparison is at fault."""
_PERMILLE = 1_000


def is_checked(job: FarmJob, node: NodeId, bundle: int) -> bool:
    """Whether the result of a bundle that goes out to a node for the first time is compared, if
    another node is there to do it when it comes.
    """
    return draw(job.draw_seed, bundle) < _checked_permille(job, job.members[node])


def _checked_permille(job: FarmJob, member: FarmMember) -> int:
    stated_permille = job.request.checked_permille
    if not stated_permille:
        return 0
    if member.wrongs:
        return max(stated_permille, DOUBTED_PERMILLE)
    return stated_permille if member.agreements >= TRIAL_AGREEMENTS else _PERMILLE


def is_on_trial(job: FarmJob, node: NodeId) -> bool:
    """Whether all that a node does is still compared, while somebody is there to compare with.

    Its bundles stay small meanwhile: a liar's are done for nothing. Where parts are compared that
    holds for a node that was outvoted, too.
    """
    member = job.members[node]
    is_new = not member.wrongs and member.agreements < TRIAL_AGREEMENTS
    return (
        bool(job.request.checked_permille)
        and (is_new or (bool(member.wrongs) and job.check_rule is CheckRule.PARTS))
        and any(_may_confirm(member, other) for other in job.members.values())
    )


def may_queue(job: FarmJob, node: NodeId) -> bool:
    """Whether a node may have its next bundle while it does one: of a node that is outvoted both
    are for nothing. Where nobody is there to compare with, nothing speaks against it.
    """
    member = job.members[node]
    is_known = not member.wrongs and member.agreements >= QUEUE_AGREEMENTS
    if is_known or not job.request.checked_permille:
        return True
    return not any(_may_confirm(member, other) for other in job.members.values())


def _may_confirm(member: FarmMember, other: FarmMember) -> bool:
    """Whether another member's result may be compared with a member's."""
    is_other_owner = bool(other.token) and other.token != member.token
    is_other_line = not other.address or other.address != member.address
    return other.can_work and is_other_owner and is_other_line


def draw(seed: str, bundle: int) -> int:
    """A bundle's draw, from 0 to 999."""
    return int(digest_of(f"check/{seed}/{bundle}".encode())[:12], 16) % _PERMILLE


def may_take_copy(job: FarmJob, bundle: int, node: NodeId) -> bool:
    """Whether a node may do a bundle that other nodes have done or have, to compare the results.

    Results that differ are decided by nodes that others confirmed, where one may do it: else fresh
    names could fill a bundle with lies until nobody is left to decide.
    """
    if not job.members[node].can_work or not is_stranger(job, bundle, node):
        return False
    if len(job.bundles[bundle].results) < _DISPUTE or is_confirmed(job.members[node]):
        return True
    return not any(
        is_confirmed(member) and member.can_work and is_stranger(job, bundle, other)
        for other, member in job.members.items()
    )


def is_confirmed(member: FarmMember) -> bool:
    """Whether other nodes' results agreed with the node's, and none outvoted it."""
    return member.agreements >= TRIAL_AGREEMENTS and not member.wrongs


def is_anybody_confirmed(job: FarmJob) -> bool:
    """Whether a node is there whose results others confirmed."""
    return any(is_confirmed(member) and member.can_work for member in job.members.values())


def is_stranger(job: FarmJob, bundle: int, node: NodeId) -> bool:
    """Whether a node has another token and address than those who have done a bundle or have it."""
    return strangers_to(job, bundle).has(node, job.members[node])


class Strangers(NamedTuple):
    """All nodes but those who have done a bundle or have it, and others of their owners."""

    nodes: frozenset[NodeId]
    tokens: frozenset[str]
    addresses: frozenset[str]

    def has(self, node: NodeId, member: FarmMember) -> bool:
        """Whether a member is one."""
        # A token that is not known may be any. An address is not known behind gateways and tunnels.
        return (
            node not in self.nodes
            and bool(member.token)
            and member.token not in self.tokens
            and (not member.address or member.address not in self.addresses)
        )


def strangers_to(job: FarmJob, bundle: int) -> Strangers:
    """The strangers to a bundle."""
    open_bundle = job.bundles[bundle]
    results = (*open_bundle.results, *(vote.result for vote in open_bundle.votes))
    busy_nodes = (*open_bundle.holders, *open_bundle.checkers)
    busy = [job.members[who] for who in busy_nodes]
    return Strangers(
        frozenset((*busy_nodes, *open_bundle.failed_checkers, *(each.node for each in results))),
        frozenset((*(each.token for each in busy), *(each.token for each in results))),
        frozenset((*(each.address for each in busy), *(each.address for each in results))),
    )


def is_undecided(job: FarmJob, bundle: int) -> bool:
    """Whether results of a bundle differ and no node of the job, there or not, can decide."""
    open_bundle = job.bundles[bundle]
    if (
        open_bundle.comparing
        or open_bundle.holders
        or len(open_bundle.results) < open_bundle.copies - 1
    ):
        return False
    return not any(
        is_stranger(job, bundle, node) and not member.ban for node, member in job.members.items()
    )


def has_confirmer(job: FarmJob, bundle: int) -> bool:
    """Whether a node is there that may do one more copy of a bundle, or does one."""
    return bool(job.bundles[bundle].holders) or has_further_confirmer(job, bundle)


def has_further_confirmer(job: FarmJob, bundle: int) -> bool:
    """Whether a node is there that may do one more copy of a bundle."""
    return any(may_take_copy(job, bundle, node) for node in job.members)


def missing_copies(open_bundle: OpenBundle) -> int:
    """How many more leases a bundle needs for the results that are asked for."""
    return open_bundle.copies - len(open_bundle.results) - len(open_bundle.holders)


def agreeing_leases(open_bundle: OpenBundle, rule: ComparisonRule) -> tuple[int, ...] | None:
    """Leases of earlier results that agree with the newest; None: their blobs must be compared."""
    *earlier, newest = open_bundle.results
    equal = tuple(each.lease for each in earlier if _is_equal(each.result, newest.result))
    if equal or rule is ComparisonRule.EXACT or not earlier:
        return equal
    return None


def _is_equal(one: BundleResult, other: BundleResult) -> bool:
    return (one.blob.digest, one.units, one.failures) == (
        other.blob.digest,
        other.units,
        other.failures,
    )

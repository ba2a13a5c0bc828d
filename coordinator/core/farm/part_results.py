"""What becomes of a bundle that another node does a part of: it is held until the votes decide."""

import msgspec
from msgspec.structs import replace

from coordinator.core.farm.acceptance import accept, reject
from coordinator.core.farm.bundle_leases import (
    FarmStep,
    assign_work,
    cancel_leases,
    put_back,
    with_lease,
)
from coordinator.core.farm.events import ResultsCompared
from coordinator.core.farm.part_checks import is_part_undecided, part_verdict
from coordinator.core.farm.state import (
    FarmJob,
    FarmPhase,
    OpenBundle,
    PartVote,
    ReturnedResult,
)
from hypergpu.units import several


class CompareResults(msgspec.Struct, frozen=True):
    """Compare the newest result of a bundle with the earlier ones: `ResultsCompared` answers."""

    bundle: int
    lease: int
    """Lease of the newest result."""


def with_open_bundle(job: FarmJob, number: int, open_bundle: OpenBundle) -> FarmJob:
    """The job in which a bundle is this one."""
    return replace(job, bundles={**job.bundles, number: open_bundle})


def take_vote(job: FarmJob, number: int, result: ReturnedResult) -> FarmStep:
    """Take in what a voter gave for the part of a bundle."""
    open_bundle = job.bundles[number]
    votes = (*open_bundle.votes, PartVote(result=result))
    job = with_open_bundle(job, number, replace(open_bundle, votes=votes))
    return settle_part(job, number)


def take_part_comparison(job: FarmJob, event: ResultsCompared) -> FarmStep:
    """Count a vote that has been compared."""
    open_bundle = job.bundles[event.bundle]
    votes = tuple(
        replace(vote, agreeing=event.agreeing) if vote.result.lease == event.lease else vote
        for vote in open_bundle.votes
    )
    open_bundle = replace(open_bundle, votes=votes, comparing=0)
    return settle_part(with_open_bundle(job, event.bundle, open_bundle), event.bundle)


def settle_part(job: FarmJob, number: int) -> FarmStep:
    """Count a bundle whose own result is in, give its items out again, or wait for votes."""
    open_bundle = job.bundles[number]
    if open_bundle.comparing:
        return FarmStep(job)
    new_lease = next(
        (vote.result.lease for vote in open_bundle.votes if vote.agreeing is None), None
    )
    if new_lease is not None:
        job = with_open_bundle(job, number, replace(open_bundle, comparing=new_lease))
        return FarmStep(job, (CompareResults(number, new_lease),))
    verdict = part_verdict(job, number)
    if verdict.is_hopeless:
        return _pause_for_comparison(job, number)
    return _settle_with(job, number, verdict.group) if verdict.group else FarmStep(job)


def _settle_with(job: FarmJob, number: int, group: tuple[ReturnedResult, ...]) -> FarmStep:
    """Accept the bundle's own result if it is in the group that counts, else do it again."""
    own = job.bundles[number].results[0]
    voters = tuple(
        each for each in group if each.lease != own.lease and not job.members[each.node].ban
    )
    if own in group:
        return accept(job, number, (own, *voters))
    return reject(job, number, voters)


def _pause_for_comparison(job: FarmJob, number: int) -> FarmStep:
    """Pause a job of which no two nodes give the same: its comparison is at fault, or its seed."""
    count = several(1 + len(job.bundles[number].votes), "node")
    step = cancel_leases(job, number, "no two nodes agree on it")
    bundle = replace(step.job.bundles[number], results=(), votes=())
    job = put_back(with_open_bundle(step.job, number, bundle), number)
    reason = (
        f"no two of {count} agree on one bundle: state a comparison by tolerance, or make the "
        "work depend on the item and the seed alone"
    )
    return FarmStep(replace(job, phase=FarmPhase.PAUSED, reason=reason), step.commands)


def settle_undecided_part(job: FarmJob, number: int) -> FarmStep:
    """Count the result of a bundle whose votes nobody can decide, as the user asked to go on. Where
    a voter that can work is the better confirmed node, it does the whole bundle, and is believed.
    """
    open_bundle = job.bundles[number]
    if not is_part_undecided(job, number):
        return FarmStep(job)
    own = open_bundle.results[0]
    best = max(
        (vote.result.node for vote in open_bundle.votes),
        key=lambda node: job.members[node].agreements,
    )
    member = job.members[best]
    is_better = member.agreements > job.members[own.node].agreements
    if not is_better or not member.can_work or best in job.leases:
        return accept(with_open_bundle(job, number, replace(open_bundle, votes=())), number, (own,))
    bundle = replace(open_bundle, results=(), votes=(), part=None)
    job = with_lease(with_open_bundle(job, number, bundle), best, number)
    return FarmStep(job, (assign_work(job, best, job.leases[best]),))

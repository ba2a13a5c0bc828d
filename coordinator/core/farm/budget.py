"""How far a job's budget and funding reach. No bundle goes out whose work might not be paid for."""

from coordinator.core.farm.checks import has_further_confirmer
from coordinator.core.farm.events import BudgetRaised
from coordinator.core.farm.state import FarmJob, OpenBundle
from hypergpu.journal.worth import samples_for


def budget_units(job: FarmJob) -> int | None:
    """Units that the job's own budget covers; None: it sets no limit."""
    request = job.request
    if not (request.unit_price and request.budget):
        return None
    return samples_for(request.unit_price, request.budget)


def budget_rejection(job: FarmJob, event: BudgetRaised) -> str:
    """Why a budget does not become that of a job; empty: it does."""
    request = job.request
    if not request.unit_price:
        return f"{job.job_id} has no price, and so no budget"
    if event.budget <= request.budget:
        return f"the budget of {job.job_id} is {request.budget}, and can only be raised"
    if (event.spec is None) is not (job.spec is None):
        verb = "is" if job.spec else "is not"
        return f"the order of {job.job_id} {verb} signed, and its new budget has to be alike"
    return ""


def spent_reason(job: FarmJob) -> str:
    """Why no further item may be given out; empty: some may."""
    if affordable_items(job) != 0:
        return ""
    limit, unit = budget_units(job), job.request.unit.value
    text = f"{unit}, of which {job.paid_units} are accepted"
    funding = job.funding
    if funding is None or not is_underfunded(job):
        return f"its budget covers {limit} {text}"
    why = f": {funding.reason}" if funding.reason else ""
    return f"its escrow covers {funding.funded_units} {text}{why}"


def is_underfunded(job: FarmJob) -> bool:
    """Whether the escrow limits the job more than its own budget does."""
    funded_units = None if job.funding is None else job.funding.funded_units
    limit = budget_units(job)
    return funded_units is not None and (limit is None or funded_units < limit)


def affordable_items(job: FarmJob) -> int | None:
    """Items that may still be given out, by the mean of those so far: whatever is out is paid.
    None: nothing limits them.
    """
    limits = [budget_units(job), job.funding.funded_units if job.funding is not None else None]
    stated_limits = [limit for limit in limits if limit is not None]
    if not stated_limits:
        return None
    due_units = job.paid_units + _units_of(job, _open_items(job))
    return max(0, min(stated_limits) - due_units) // _units_of(job, 1)


def _open_items(job: FarmJob) -> int:
    """Items that are out, once for each result that is due."""
    return sum(
        _part_items(open_bundle)
        if open_bundle.part is not None
        else open_bundle.run.items * _due_results(job, number)
        for number, open_bundle in job.bundles.items()
    )


def _part_items(open_bundle: OpenBundle) -> int:
    """Items of a bundle whose part is checked: its own, and those of each vote, one at least."""
    if open_bundle.part is None:
        return open_bundle.run.items
    votes = len(open_bundle.votes) + len(open_bundle.checkers)
    return open_bundle.run.items + max(1, votes) * open_bundle.part.items


def _due_results(job: FarmJob, number: int) -> int:
    """Results of a bundle that may be paid: as many as are asked for, where nodes are there."""
    open_bundle = job.bundles[number]
    copies = len(open_bundle.results) + len(open_bundle.holders)
    if copies >= open_bundle.copies or not has_further_confirmer(job, number):
        return copies
    return open_bundle.copies


def _units_of(job: FarmJob, items: int) -> int:
    """Units that so many items are expected to have: the mean so far, rounded up; before any result
    the most that they may have.
    """
    valued_items = job.settled_items - job.failed_items
    if job.request.unit.is_count_of_items:
        return items
    if valued_items <= 0:
        return items * job.request.units_per_item_most
    return -(-items * job.units // valued_items)

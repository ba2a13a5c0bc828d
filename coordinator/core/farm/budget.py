"""How far a job's budget and funding reach. No bundle goes out whose work might not be paid for."""

from coordinator.core.farm.state import FarmJob
from coordinator.core.work.funding import unfunded_left
from hypergpu.journal.worth import samples_for


def budget_units(job: FarmJob) -> int | None:
    """Units that the job's own budget covers; None: it sets no limit."""
    request = job.request
    if not (request.unit_price and request.budget):
        return None
    return samples_for(request.unit_price, request.budget)


def spent_reason(job: FarmJob) -> str:
    """Why no further item may be given out; empty: some may."""
    limit, unit = budget_units(job), job.request.unit.value
    if limit is None and job.funding is None:
        return ""
    due = _units_of(job, 1)
    done_units = job.paid_units + _units_of(job, _open_items(job))
    if limit is not None and done_units + due > limit:
        return f"its budget covers {limit} {unit}, of which {job.paid_units} are accepted"
    if unfunded_left(job.funding, due, done_units) is not None:
        covered_units = job.funding.funded_units if job.funding is not None else 0
        why = job.funding.reason if job.funding is not None else ""
        text = f"its escrow covers {covered_units} {unit}, of which {job.paid_units} are accepted"
        return f"{text}: {why}" if why else text
    return ""


def _open_items(job: FarmJob) -> int:
    """Items that are out, once for each result that is due."""
    return sum(
        open_bundle.run.items * max(open_bundle.copies, len(open_bundle.holders))
        for open_bundle in job.bundles.values()
    )


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

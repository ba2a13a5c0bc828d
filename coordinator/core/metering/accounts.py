"""What a job owes its nodes: for certain, at most, and by the vouchers they hold."""

from collections.abc import Iterator, Mapping

from msgspec.structs import replace

from coordinator.core.job import ENDED, Account, Job, Metering, Round, Work
from hypergpu.ids import NodeId
from hypergpu.ledger import pay
from hypergpu.ledger.voucher import next_amount
from hypergpu.units import BasisPoints, Samples, Wei


def account_of(metering: Metering, node: NodeId) -> Account:
    """A node's account; an empty one before its first receipt."""
    return metering.accounts.get(node, Account())


def vouched(job: Job, nodes: tuple[NodeId, ...]) -> Job:
    """Raise what vouchers say of these nodes to what they have earned by now."""
    metering, rule = job.metering, job.spec.pay
    if not rule.unit_price:
        return job
    raised: dict[NodeId, Account] = {}
    for node in nodes:
        account = account_of(metering, node)
        advanced = sum(
            pay.guaranteed(Wei(rule.unit_price), samples, BasisPoints(rule.guaranteed_bps))
            for samples in _unmeasured(job, node)
        )
        amount = next_amount(account.vouched, earned(job, node), Wei(advanced))
        if amount != account.vouched:
            raised[node] = replace(account, vouched=amount)
    if not raised:
        return job
    return replace(job, metering=replace(metering, accounts={**metering.accounts, **raised}))


def owed_at_most(job: Job) -> Wei:
    """What the job comes to if all that is not measured yet is of full quality."""
    return owed_beyond(job, {})


def owed_beyond(job: Job, counted: Mapping[NodeId, int]) -> Wei:
    """The same, less what is counted of each node: beyond its own it counts for no other."""
    price, unmeasured = Wei(job.spec.pay.unit_price), _nodes_unmeasured(job)
    total = 0
    for node in {*job.metering.accounts, *unmeasured}:
        most = _measured(job, node)
        if node in unmeasured:
            most += sum(pay.cost_at_most(price, samples) for samples in _unmeasured(job, node))
        most = max(most, account_of(job.metering, node).vouched)
        total += max(0, most - counted.get(node, 0))
    return Wei(total)


def voucher_holders(job: Job) -> frozenset[NodeId]:
    """Nodes whose vouchers are worth anything; some have no receipt yet."""
    return frozenset(node for node, account in job.metering.accounts.items() if account.vouched)


def settled_at_most(job: Job) -> dict[NodeId, int]:
    """What each node comes to by its receipts alone."""
    return {node: _measured(job, node) for node in job.metering.accounts}


def _measured(job: Job, node: NodeId) -> int:
    score = sum(epoch.scores.get(node, 0) for epoch in job.metering.epochs)
    in_open_epochs = -(-job.spec.pay.unit_price * score // pay.PRICED_SCORE)
    return account_of(job.metering, node).earned + in_open_epochs


def _nodes_unmeasured(job: Job) -> set[NodeId]:
    nodes = set(job.round.participants if job.round else ())
    return nodes.union(*(waiting.due for waiting in job.metering.unmeasured))


def earned(job: Job, node: NodeId) -> Wei:
    """What a node's receipts are worth for certain: of open epochs the least."""
    price = Wei(job.spec.pay.unit_price)
    scores = (epoch.scores.get(node, 0) for epoch in job.metering.epochs)
    return Wei(
        account_of(job.metering, node).earned
        + sum(pay.earned_at_least(price, score) for score in scores)
    )


def _unmeasured(job: Job, node: NodeId) -> Iterator[Samples]:
    """Samples of each accepted update of the node that has no receipt yet."""
    for waiting in job.metering.unmeasured:
        if (due := waiting.due.get(node)) is not None:
            yield due.contribution.samples
    # What an ended job's last round accepted had its receipts as it ended.
    if job.round is None or job.phase in ENDED:
        return
    if (samples := _received(job.round, node)) is not None:
        yield samples


def _received(round_: Round, node: NodeId) -> Samples | None:
    participant = round_.participants.get(node)
    if participant is None or participant.work is not Work.RECEIVED or not participant.update:
        return None
    return participant.update.samples

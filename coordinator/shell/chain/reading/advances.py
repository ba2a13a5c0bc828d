"""Reads what redeemed vouchers have paid of a job ahead of its shares."""

from typing import NamedTuple

from coordinator.core.settlement.epoch import Epoch, EpochState
from coordinator.core.settlement.shortfall import ShortEpoch
from coordinator.shell.chain.site import LedgerSite
from coordinator.shell.journal.ledger.interface import Outbox
from hypergpu.chain.ledger import SHARE_DUE, EpochOnChain, Share
from hypergpu.chain.rpc.answers import Block
from hypergpu.ids import JobId, NodeId
from hypergpu.ledger.advance import NodeMoney
from hypergpu.ledger.pay import PRICED_SCORE, reward
from hypergpu.ledger.settlement.state import ShareState
from hypergpu.units import Wei


class Advances(NamedTuple):
    """A job's nodes and its short epochs, as of one block."""

    nodes: dict[NodeId, NodeMoney]
    short: tuple[ShortEpoch, ...]
    is_over: bool
    """Every epoch that is known is final: only vouchers can change anything yet."""

    @property
    def lacking(self) -> int:
        """What short epochs left unpaid, and no voucher has paid since."""
        return sum(money.lacking for money in self.nodes.values())

    def owed(self, unclosed: int, worths: dict[NodeId, int]) -> int:
        """What the escrow owes.

        Args:
            unclosed: What the receipts that no closed epoch has counted are worth.
            worths: What all receipts of each node are worth.
        """
        rest = sum(money.rest for money in self.nodes.values())
        paid = sum(money.outstanding(worths.get(node, 0)) for node, money in self.nodes.items())
        return max(0, unclosed + rest - paid)


def advances(
    site: LedgerSite, outbox: Outbox, job_id: JobId, unit_price: int, at: Block
) -> Advances:
    """Ask for every node of a job: one call for each, and for each share that is not settled.

    Raises:
        RpcError: the chain cannot be asked.
    """
    of_job = [one.epoch for one in outbox.epochs(is_final_too=True) if one.epoch.job_id == job_id]
    asked = [one for one in of_job if one.short or one.state is not EpochState.FINAL]
    due: dict[NodeId, int] = {}
    rest: dict[NodeId, int] = {}
    short: list[ShortEpoch] = []
    seen = site.epochs(job_id, [epoch.number for epoch in asked], at)
    for epoch, on_chain in zip(asked, seen, strict=True):
        if not on_chain.closed_at_s:
            continue
        worth = unit_price * on_chain.total_score // PRICED_SCORE
        if on_chain.pool < worth:
            short.append(ShortEpoch(epoch.number, on_chain.pool, worth))
        for node, share in zip(epoch.nodes, site.shares(epoch, at), strict=True):
            if share.state == SHARE_DUE:
                due[node] = due.get(node, 0) + share.reward
            if share.state != ShareState.VOID.value:
                rest[node] = rest.get(node, 0) + _rest(worth, share, on_chain)
    nodes = sorted(outbox.sealed_counts(job_id))
    found = {
        node: NodeMoney(
            had=account.paid + account.pending,
            earned=account.earned,
            voided=account.voided,
            due=due.get(node, 0),
            rest=rest.get(node, 0),
        )
        for node, account in zip(nodes, site.accounts(job_id, nodes, at), strict=True)
    }
    return Advances(found, tuple(short), all(_is_over(epoch) for epoch in of_job))


def _rest(worth: int, share: Share, on_chain: EpochOnChain) -> int:
    return reward(Wei(worth), share.score, on_chain.total_score) - share.reward


def _is_over(epoch: Epoch) -> bool:
    return epoch.state is EpochState.FINAL

"""Reads what redeemed vouchers have paid of a job ahead of its shares."""

from collections.abc import Collection, Mapping
from typing import NamedTuple

from coordinator.core.settlement.epoch import Epoch, EpochState
from coordinator.core.settlement.shortfall import ShortEpoch
from coordinator.shell.chain.site import LedgerSite
from coordinator.shell.journal.ledger.interface import Outbox
from hypergpu.chain.ledger import EpochOnChain, NodeAccount, Share
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

    @property
    def coming(self) -> int:
        """What shares that are due will make good."""
        return sum(money.coming for money in self.nodes.values())

    @property
    def had(self) -> dict[NodeId, int]:
        """What each node's voucher is good for no more."""
        return {node: money.had + money.voided for node, money in self.nodes.items()}

    @property
    def is_ahead(self) -> bool:
        """Whether a voucher has paid anything ahead of shares."""
        return any(money.ahead for money in self.nodes.values())

    def owed(self, unclosed: int, worths: Mapping[NodeId, int]) -> int:
        """What the escrow owes.

        Args:
            unclosed: What the receipts that no closed epoch has counted are worth.
            worths: What all receipts of each node are worth; read only where one is ahead.
        """
        rest = sum(money.rest for money in self.nodes.values())
        paid = sum(money.outstanding(worths.get(node, 0)) for node, money in self.nodes.items())
        return max(0, unclosed + rest - paid)


class _Closed(NamedTuple):
    """What the shares of one closed epoch come to."""

    due: dict[NodeId, int]
    rest: dict[NodeId, int]
    short: ShortEpoch | None


class AdvanceReader:
    """Used by the pipeline's thread. Its requests do not grow with the epochs of a job.

    Shares are asked for only where they matter: of nodes that a voucher has paid ahead of them, and
    of epochs that were closed short. Those of a final epoch stay as they are.
    """

    def __init__(self, outbox: Outbox) -> None:
        self._outbox = outbox
        self._settled: dict[tuple[JobId, int], _Closed] = {}
        """Of short epochs that are final."""
        self._worths: dict[JobId, tuple[int, Mapping[NodeId, int]]] = {}
        """What nodes' receipts weigh, and how many receipts that counts."""

    def read(
        self,
        site: LedgerSite,
        job_id: JobId,
        unit_price: int,
        at: Block,
        holders: Collection[NodeId],
    ) -> Advances:
        """Ask for every node of a job.

        Args:
            site: The ledger.
            job_id: Which.
            unit_price: Its own.
            at: As of which block.
            holders: Of vouchers: before its first receipt no other record names a node.

        Raises:
            RpcError: the chain cannot be asked.
        """
        records = self._outbox.epochs(is_final_too=True)
        of_job = [one.epoch for one in records if one.epoch.job_id == job_id]
        nodes = sorted({*self._outbox.sealed_counts(job_id), *holders})
        accounts = dict(zip(nodes, site.accounts(job_id, nodes, at), strict=True))
        every = self._closed(site, of_job, accounts, unit_price, at)
        found = {
            node: NodeMoney(
                had=account.paid + account.pending,
                earned=account.earned,
                voided=account.voided,
                due=sum(one.due.get(node, 0) for one in every),
                rest=sum(one.rest.get(node, 0) for one in every),
            )
            for node, account in accounts.items()
        }
        short = tuple(one.short for one in every if one.short is not None)
        return Advances(found, short, all(epoch.state is EpochState.FINAL for epoch in of_job))

    def worths(self, job_id: JobId, unit_price: int) -> Mapping[NodeId, int]:
        """What all receipts of each node are worth. They are added up again when there are more."""
        kept = sum(self._outbox.sealed_counts(job_id).values())
        kept += self._outbox.waiting_counts().get(job_id, 0)
        if self._worths.get(job_id, (-1, {}))[0] != kept:
            self._worths[job_id] = (kept, self._outbox.node_scores(job_id))
        scores = self._worths[job_id][1]
        return {node: unit_price * score // PRICED_SCORE for node, score in scores.items()}

    def forget(self, job_id: JobId) -> None:
        """Nothing is going to be asked of this job for long."""
        self._worths.pop(job_id, None)

    def _closed(
        self,
        site: LedgerSite,
        epochs: list[Epoch],
        accounts: Mapping[NodeId, NodeAccount],
        unit_price: int,
        at: Block,
    ) -> list[_Closed]:
        """What is to be known of a job's closed epochs, in their order."""
        ahead = {node for node, one in accounts.items() if one.paid + one.pending > one.earned}
        known = {epoch.number: self._known(epoch) for epoch in epochs}
        asked = [
            epoch
            for epoch in epochs
            if (epoch.short or epoch.state is not EpochState.FINAL) and not known[epoch.number]
        ]
        if asked:
            job_id = asked[0].job_id
            seen = site.epochs(job_id, [epoch.number for epoch in asked], at)
            closed = [pair for pair in zip(asked, seen, strict=True) if pair[1].closed_at_s]
            wanted = [
                (epoch.number, node)
                for epoch, on_chain in closed
                for node in epoch.nodes
                if node in ahead or on_chain.pool < _worth(on_chain, unit_price)
            ]
            shares = dict(zip(wanted, site.shares_of(job_id, wanted, at), strict=True))
            for epoch, on_chain in closed:
                of_epoch = {
                    node: one for (number, node), one in shares.items() if number == epoch.number
                }
                known[epoch.number] = found = _come_to(epoch, on_chain, of_epoch, unit_price)
                if epoch.state is EpochState.FINAL and not found.due:
                    self._settled[job_id, epoch.number] = found
        return [one for one in known.values() if one is not None]

    def _known(self, epoch: Epoch) -> _Closed | None:
        name = (epoch.job_id, epoch.number)
        if epoch.state is not EpochState.FINAL:
            # A reorganisation was too deep: what was final is so no more.
            self._settled.pop(name, None)
        return self._settled.get(name)


def _come_to(
    epoch: Epoch, on_chain: EpochOnChain, shares: Mapping[NodeId, Share], unit_price: int
) -> _Closed:
    worth = _worth(on_chain, unit_price)
    due = {
        node: share.reward for node, share in shares.items() if share.state == ShareState.DUE.value
    }
    if on_chain.pool >= worth:
        return _Closed(due, {}, None)
    rest = {
        node: reward(Wei(worth), share.score, on_chain.total_score) - share.reward
        for node, share in shares.items()
        if share.state != ShareState.VOID.value
    }
    return _Closed(due, rest, ShortEpoch(epoch.number, on_chain.pool, worth))


def _worth(on_chain: EpochOnChain, unit_price: int) -> int:
    return unit_price * on_chain.total_score // PRICED_SCORE

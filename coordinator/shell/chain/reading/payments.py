"""Asks the ledger what an epoch's payments have done, and believes only what can be."""

from collections.abc import Iterable

from coordinator.core.settlement.counting import SeenEpoch, SeenShare, doubt, unrecorded
from coordinator.core.settlement.epoch import Epoch, PaymentsCounted
from coordinator.shell.chain.site import LedgerSite
from coordinator.shell.journal.ledger.interface import Outbox
from hypergpu.chain.ledger import EpochOnChain, Share
from hypergpu.chain.rpc.answers import Block
from hypergpu.chain.rpc.errors import RpcGarbledError
from hypergpu.ids import NodeId
from hypergpu.ledger.pay import PRICED_SCORE
from hypergpu.ledger.settlement.state import ShareState


class Payments:
    """Used by the pipeline's thread. Every method raises `RpcError` where nothing is known."""

    def __init__(self, site: LedgerSite, outbox: Outbox) -> None:
        self._site = site
        self._outbox = outbox

    def counted(self, epoch: Epoch, head: Block) -> PaymentsCounted:
        """Whom the epoch's payments passed over, by the newest block.

        Raises:
            RpcGarbledError: what the chain's RPC says cannot be of this block.
        """
        return self._counted_at(epoch, head, is_deep=False)

    def checked(self, epoch: Epoch, head: Block) -> PaymentsCounted:
        """The same by a block that stays, once all of the epoch's transactions are final."""
        return self._counted_at(epoch, self._site.deep(head), is_deep=True)

    def still_due(self, epoch: Epoch, head: Block) -> tuple[NodeId, ...]:
        """Nodes that are owed their shares of a closed epoch."""
        shares, _ = self._asked(epoch, head)
        return tuple(
            node
            for node, share in zip(epoch.nodes, shares, strict=True)
            if share.state == ShareState.DUE.value
        )

    def _counted_at(self, epoch: Epoch, at: Block, *, is_deep: bool) -> PaymentsCounted:
        shares, on_chain = self._asked(epoch, at)
        job = self._site.job(epoch.job_id, at)
        if job is None:
            raise RpcGarbledError(f"the chain's RPC does not know {epoch.job_id}, and its epochs")
        worth = job.unit_price * on_chain.total_score // PRICED_SCORE
        return PaymentsCounted(
            deferred=sum(share.state == ShareState.DUE.value for share in shares),
            window_ends_s=on_chain.closed_at_s + self._site.window_s,
            is_whole=sum(share.score for share in shares) == on_chain.total_score,
            short=max(0, worth - on_chain.pool),
            is_deep=is_deep,
        )

    def _asked(self, epoch: Epoch, at: Block) -> tuple[list[Share], EpochOnChain]:
        shares, on_chain = self._site.shares(epoch, at), self._site.epoch(epoch, at)
        seen = SeenEpoch(on_chain.total_score, on_chain.pool, on_chain.closed_at_s)
        each = [
            SeenShare(share.state != ShareState.NONE.value, share.score, share.reward, share.paid)
            for share in shares
        ]
        missing = unrecorded(epoch, each)
        sent = self._sent(epoch, missing) if missing else {}
        if why := doubt(epoch, seen, each, sent):
            raise RpcGarbledError(
                f"the chain's RPC is behind at block {at.number}, or the chain was put back and is"
                f" being sent what it lacks: {why}"
            )
        return shares, on_chain

    def _sent(self, epoch: Epoch, nodes: Iterable[NodeId]) -> dict[NodeId, int]:
        """The score that the epoch's batches hold of some nodes."""
        sent = dict.fromkeys(nodes, 0)
        for batch in self._outbox.batches(epoch.job_id):
            if batch.account == self._site.account and batch.epoch == epoch.number:
                for span in batch.spans:
                    if span.node in sent:
                        sent[span.node] += span.score
        return sent

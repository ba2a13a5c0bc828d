"""How far pay is, asked of a ledger at one block."""

from collections.abc import Mapping, Sequence

from hypergpu.chain.reading.ledger import LedgerReader
from hypergpu.chain.rpc.answers import Block
from hypergpu.chain.rpc.chain import EvmChain
from hypergpu.chain.rpc.errors import RpcRefusedError
from hypergpu.cli.ledger.tiers.standing import TIERS, Clock, PayView, node_tiers
from hypergpu.ids import JobKey, NodeId
from hypergpu.ledger.typed import Domain, address_bytes

SHARES_MOST = 2_000
"""That are asked for at once; public RPCs bear no more."""


class PayReader:
    """Asks one ledger. Every method raises `RpcError` when there is no answer to believe."""

    def __init__(self, chain: EvmChain, ledger: Domain) -> None:
        self._chain = chain
        self._domain = ledger
        self._ledger = LedgerReader(chain, address_bytes(ledger.contract))

    def pay(
        self, job: JobKey, vouched: Mapping[NodeId, int], epochs: Sequence[int]
    ) -> PayView | None:
        """How far the pay of a job's nodes is, at the newest block.

        None: the ledger does not know the job.

        Args:
            job: Which one.
            vouched: What each node's newest voucher says.
            epochs: That may have been recorded in, ascending.
        """
        head = self._chain.head()
        try:
            price = self._ledger.job(job, head).unit_price
        except RpcRefusedError as refused:
            # Without the contract's own words it was the RPC that refused.
            if not refused.words:
                raise
            return None
        clock = Clock(head.time_s, self._ledger.window_s(head))
        kept = list(epochs)[-max(1, SHARES_MOST // max(1, len(vouched))) :]
        closed = self._closed(job, kept, head)
        nodes = list(vouched)
        places = [(number, node) for node in nodes for number in closed]
        shares = self._ledger.share_facts(job, places, head)
        return PayView(
            chain_id=self._domain.chain_id,
            contract=self._domain.contract,
            block=head.number,
            time_s=head.time_s,
            window_s=clock.window_s,
            first_epoch=kept[0] if kept else 0,
            tiers=TIERS,
            nodes=[
                node_tiers(
                    account,
                    [share for share in shares if share.node == account.node],
                    closed,
                    unit_price=price,
                    vouched=vouched[account.node],
                    clock=clock,
                )
                for account in self._ledger.account_facts(job, nodes, head)
            ],
        )

    def _closed(self, job: JobKey, numbers: Sequence[int], at: Block) -> dict[int, int]:
        """When each epoch was closed of those that were recorded in; 0: it is open."""
        found = zip(numbers, self._ledger.epochs(job, numbers, at), strict=True)
        return {
            number: epoch.closed_at_s
            for number, epoch in found
            if epoch.opened_at_s or epoch.closed_at_s
        }

"""What counts as failed for want of a receipt, and may have had its effect all the same."""

from collections.abc import Sequence

import structlog

from coordinator.core.settlement.sending import BlockName, TransactionState
from coordinator.shell.chain.nonces.tracing import NonceTracer, Whose
from coordinator.shell.chain.pump import HaltError
from coordinator.shell.chain.sending import Account, is_act, unix_ms
from coordinator.shell.chain.site import LedgerSite, opening_purpose
from coordinator.shell.journal.ledger.interface import Outbox
from coordinator.shell.journal.ledger.records import OutboxChange, OutboxRow, Progress
from hypergpu.chain.rpc.answers import Block
from hypergpu.chain.rpc.chain import EvmChain

log = structlog.get_logger()

_OLD_STATE_FIX = (
    "name an RPC that has old state, or the receipt, and start once more with: hypergpu up"
    " --retry-failed"
)


class Receiptless:
    """Used by the mender."""

    def __init__(self, chain: EvmChain, account: Account, outbox: Outbox, site: LedgerSite) -> None:
        self._chain = chain
        self._account = account
        self._outbox = outbox
        self._site = site
        self._tracer = NonceTracer(chain, account.address)

    def left_out(self, failed: Sequence[OutboxRow], head: Block) -> Sequence[OutboxRow] | None:
        """All but openings that the ledger shows, which are final then.

        None: one is in a block that gave no receipt of it, and nothing may be given up.

        Raises:
            RpcError: the chain cannot be asked; nothing was changed.
            HaltError: one may have brought tokens to the ledger, and the RPC cannot tell.
        """
        deep = self._site.deep(head)
        opened = [
            row
            for row in failed
            if row.block is None and self._site.is_opened_by(row.transaction, deep)
        ]
        others = [row for row in failed if row not in opened]
        if any(row.block is None and self._is_ours(row, head) for row in others):
            return None
        if opened:
            # The block that has it is not known: it is seen in this one, which stays.
            block = BlockName(deep.number, deep.hash)
            progress = tuple(
                Progress(row.transaction.nonce, TransactionState.FINAL, True, block, unix_ms())
                for row in opened
            )
            self._outbox.write(OutboxChange(account=self._account.name, progress=progress))
        return others

    def _is_ours(self, row: OutboxRow, head: Block) -> bool:
        whose, words = self._tracer.trace(row, head)
        if whose is Whose.OURS:
            return True
        if whose is Whose.UNKNOWN and self._is_deposit(row) and not self.is_by_act(row):
            transaction = row.transaction
            raise HaltError(
                f"transaction {transaction.nonce} ({transaction.purpose}) may have taken effect:"
                f" {words}. It would bring its tokens twice, and nothing is signed again",
                fix=_OLD_STATE_FIX,
            )
        log.warning("a nonce was used by others", what=row.transaction.purpose, reason=words)
        return False

    def _is_deposit(self, row: OutboxRow) -> bool:
        """Whether it brings tokens, unseen: what is no opening, which the ledger would show."""
        transaction = row.transaction
        if is_act(transaction) or not self._site.calls.taken(transaction.call):
            return False
        job_id = transaction.job_id
        return job_id is None or transaction.purpose != opening_purpose(job_id)

    def is_by_act(self, row: OutboxRow) -> bool:
        """Whether an operator's command has used its nonce.

        Raises:
            RpcError: the chain cannot be asked.
        """
        names = [act.hash for act in self._account.acts_at(row.transaction.nonce)]
        return any(place is not None for place in self._chain.inclusions(names))

"""Whether the ledger takes what is about to be signed, and why it did not take what was sent.

An RPC that cannot try calls (see `hypergpu.chain.trial`) tells nothing beforehand: what fails there
is found in its block.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

from coordinator.core.settlement.refused import Failure, Refused, failed, refused_with
from coordinator.core.settlement.sending import IN_A_BLOCK, TransactionState
from coordinator.shell.chain.founding import JobOrder
from coordinator.shell.chain.sending import Account
from coordinator.shell.chain.site import LedgerSite
from coordinator.shell.journal.ledger.interface import Outbox
from coordinator.shell.journal.ledger.records import OutboxRow
from hypergpu.chain.abi import Abi
from hypergpu.chain.moments import texts
from hypergpu.chain.rpc.answers import Block, Inclusion
from hypergpu.chain.rpc.chain import EvmChain
from hypergpu.chain.trial import OwnCall, tried

_LANGUAGE = Abi(
    [
        {"type": "error", "name": "Error", "inputs": [{"name": "reason", "type": "string"}]},
        {"type": "error", "name": "Panic", "inputs": [{"name": "code", "type": "uint256"}]},
    ]
)
"""What contracts say that name no error of their own."""
_BEFORE_MOST = 64
"""Calls of the same block that are made again before one that failed in it."""


class HeldOrder(NamedTuple):
    """An order that is not signed, since the ledger would refuse it as things stand."""

    order: JobOrder
    height: int
    """Of the block that it was tried in."""
    why: str
    fix: str
    is_passing: bool = False
    """Nobody here has to mend anything: it is waited for."""

    @property
    def complaint(self) -> str:
        """For whoever looks at how settling goes."""
        return f"{self.why}. Fix: {self.fix}; it is tried again with every block"


class Foresight:
    """Used by the pipeline's thread."""

    def __init__(self, chain: EvmChain, account: Account, outbox: Outbox, site: LedgerSite) -> None:
        self._chain = chain
        self._account = account
        self._outbox = outbox
        self._site = site

    def refused(
        self, calls: Sequence[OwnCall], head: Block, before: Sequence[OwnCall] = ()
    ) -> Refused | None:
        """Why calls would be refused behind what is on its way; None: nothing is known to be wrong.

        Args:
            calls: In order.
            head: The block that the journal was last brought up to.
            before: What is going to be signed before them.

        Raises:
            RpcError: the chain cannot be asked.
        """
        coming = self._on_its_way(head)
        if any(not each.to for each in coming):
            return None  # The ledger itself.
        before = (*coming, *before)
        trial = tried(self._chain, self._account.address, calls, before, head.hash)
        return self._meant(trial.said) if trial.is_refused else None

    def failure(self, row: OutboxRow) -> Failure | None:
        """Why a transaction failed that is in a block; None: nobody knows.

        Raises:
            RpcError: the chain cannot be asked.
        """
        names = [each.attempt.hash for each in row.attempts if not each.attempt.is_void]
        place = next(filter(None, self._chain.inclusions(names)), None)
        if place is None or place.is_success:
            return None
        found = self._said_to(row, place)
        return failed(found, place.gas_used, row.transaction.gas)

    def _said_to(self, row: OutboxRow, place: Inclusion) -> Refused | None:
        """What is said to a failed call that is made again in its block, or else behind it.

        In it, it comes behind what the account did there before. What others did there shows only
        behind it.
        """
        (block,) = self._chain.blocks([place.block_number])
        before = self._before(row, place)
        if block is None or block.hash != place.block_hash or len(before) > _BEFORE_MOST:
            return None
        call = OwnCall(row.transaction.to, row.transaction.call)
        for calls, at in ((before, block.parent), ([], block.hash)):
            trial = tried(self._chain, self._account.address, [call], calls, at)
            if trial.is_refused:
                return self._meant(trial.said)
        return None

    def _before(self, row: OutboxRow, place: Inclusion) -> list[OwnCall]:
        rows = self._outbox.transactions(self._account.name, states=[*IN_A_BLOCK])
        return [
            OwnCall(each.transaction.to, each.transaction.call)
            for each in rows
            if each.transaction.nonce < row.transaction.nonce
            and each.block is not None
            and each.block.hash == place.block_hash
            and each.transaction.to
        ]

    def _on_its_way(self, head: Block) -> list[OwnCall]:
        """What makes tokens, moves them or opens jobs and is in no block up to this one."""
        states = [TransactionState.WAITING, TransactionState.MINED]
        return [
            OwnCall(row.transaction.to, row.transaction.call)
            for row in self._outbox.transactions(self._account.name, states=states)
            if not row.transaction.part and (row.block is None or row.block.number > head.number)
        ]

    def _meant(self, said: bytes) -> Refused:
        name, values = self._told(said)
        return refused_with(name, texts(values), said)

    def _told(self, said: bytes) -> tuple[str, dict[str, Any]]:
        calls = self._site.calls
        for abi in (calls.abi, calls.token, _LANGUAGE):
            if told := abi.failure(said):
                return told
        return "", {}

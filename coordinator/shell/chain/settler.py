"""One run on one chain: reach it, see that a ledger is there, then turn after turn."""

from collections.abc import Iterable
from pathlib import Path

import msgspec

from coordinator.core.settlement.sealing import SealingRule
from coordinator.core.settlement.sending import TransactionState
from coordinator.shell.chain.escrow import EscrowBook
from coordinator.shell.chain.founding import (
    JobOrder,
    deploy,
    fill_account,
    open_job,
    raise_escrow,
)
from coordinator.shell.chain.pump import Pump
from coordinator.shell.chain.sealer import Sealer
from coordinator.shell.chain.sending import Account
from coordinator.shell.chain.site import LedgerSite
from coordinator.shell.chain.turns import Turn
from coordinator.shell.journal.ledger.interface import Outbox
from coordinator.shell.journal.ledger.records import OutboxRow
from hypergpu.chain.profiles import ChainProfile
from hypergpu.chain.rpc.answers import Block
from hypergpu.chain.rpc.chain import EvmChain
from hypergpu.chain.rpc.client import Rpc
from hypergpu.ids import Address, JobId
from hypergpu.ledger.typed import address_bytes
from hypergpu.refusal import Reason, RefusalError


class SettlingOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Which chain, which ledger, and how receipts reach it."""

    profile: ChainProfile
    rule: SealingRule
    contract: Address | None = None
    """A ledger that is there; None: one is deployed, on local chains only."""
    lock_folder: Path
    """Where keys are locked: one folder for all that may use them."""
    retries_failed: bool = False
    """Whether transactions that failed are signed again, once, at this start."""


class Settler:
    """Used by one thread, and dropped when its chain has to be reached afresh."""

    def __init__(
        self,
        rpc: Rpc,
        account: Account,
        outbox: Outbox,
        options: SettlingOptions,
        escrow: EscrowBook,
    ) -> None:
        self._chain = EvmChain(rpc)
        self._account = account
        self._outbox = outbox
        self._options = options
        self._escrow = escrow
        self._pump = Pump(self._chain, account, outbox, options.profile)
        self._read_at = -1
        self._is_checked = False
        self._elsewhere: dict[JobId, str] = {}
        """Jobs that belong to another ledger, and why."""
        self._pump.is_mending = options.retries_failed and bool(self._failed())
        self.site = self._founded()
        self._sealer = Sealer(self.site, account, outbox, options.rule)

    @property
    def contract(self) -> Address:
        """The ledger's address."""
        return Address("0x" + self.site.contract.hex())

    def turn(self, orders: Iterable[JobOrder]) -> tuple[Turn, int]:
        """Look at everything once and act.

        Args:
            orders: Jobs that are to be open, with their escrow.

        Returns:
            What the pump found, and how many transactions were sealed behind it.

        Raises:
            RpcError: the chain cannot be asked now.
            HaltError: sending has stopped for good.
            RefusalError: the ledger is not the one it should be.
        """
        turn = self._pump.turn()
        head = turn.head
        if any(event.topics[:1] == (self.site.skipped_topic,) for event in turn.events):
            self._sealer.is_reconcile_due = True
        self._check_once(turn)
        if self._pump.is_mending:
            return turn, self._mended(turn)
        for order in orders:
            self._take(order, head)
        sealed = self._sealer.turn(head, turn.waiting)
        if head.number != self._read_at:
            self._escrow.look(self.site, head.number)
            self._read_at = head.number
        complaints = (*turn.complaints, *self._elsewhere.values())
        return turn._replace(complaints=complaints), sealed

    def _take(self, order: JobOrder, head: Block) -> None:
        """Sign what an order needs, unless the job is another ledger's."""
        if why := self.site.why_elsewhere(order.job_id, order.signed_for):
            self._elsewhere[order.job_id] = why
            return
        self._escrow.follow(order.job_id, order.unit_price)
        act = raise_escrow if self.site.is_opened(order.job_id) else open_job
        act(self.site, self._account, self.site.token(), order, head)

    def close(self) -> None:
        """Let go of the connection."""
        self._chain.rpc.close()

    def _failed(self) -> tuple[OutboxRow, ...]:
        return self._outbox.transactions(self._account.name, states=[TransactionState.FAILED])

    def _mended(self, turn: Turn) -> int:
        """Sign what failed again, once everything behind it has had its turn."""
        if turn.waiting or turn.mined:
            return 0
        failed = self._failed()
        self._account.seal_again(failed, turn.head)
        self._pump.is_mending = False
        return len(failed)

    def _founded(self) -> LedgerSite:
        """Reach the chain, check it, and see that there is a ledger."""
        profile, options = self._options.profile, self._options
        found = self._chain.chain_id()
        if found != profile.chain_id:
            raise RefusalError(
                Reason.CHAIN_WRONG,
                f"the RPC at {self._chain.where} is of chain {found}, not of {profile.chain_id}",
            )
        next_nonce = self._chain.next_nonce(self._account.address)
        self._check_nonce(next_nonce)
        fill_account(self._chain, self._account, profile)
        self._account.begin_at(next_nonce, self._chain.tip_wei())
        if options.contract is not None:
            site = self._site_at(address_bytes(options.contract))
            site.check()
            self._is_checked = True
            return site
        if not profile.is_local:
            raise RefusalError(
                Reason.LEDGER_WRONG, f"no ledger is named for chain {profile.chain_id}"
            )
        head = self._chain.head()
        return self._site_at(deploy(self._account, self._outbox, profile, head))

    def _site_at(self, contract: bytes) -> LedgerSite:
        return LedgerSite(
            self._chain, self._outbox, self._account.name, self._options.profile, contract
        )

    def _check_nonce(self, next_nonce: int) -> None:
        stored = self._outbox.next_nonce(self._account.name)
        if stored is not None and next_nonce > stored:
            raise RefusalError(
                Reason.LEDGER_AHEAD,
                f"chain {self._account.name.chain_id} has seen {next_nonce} transactions of "
                f"{self._account.name.address}, the journal knows {stored}",
            )

    def _check_once(self, turn: Turn) -> None:
        """Check a ledger that was deployed here as soon as it is mined, and jobs' batches."""
        if self._is_checked or turn.waiting:
            return
        self.site.check()
        for job_id in {record.epoch.job_id for record in self._outbox.epochs()}:
            job = self.site.job(job_id)
            known = self._outbox.next_batch(self._account.name, job_id)
            if job is not None and job.next_sequence > known:
                raise RefusalError(
                    Reason.LEDGER_AHEAD,
                    f"the ledger expects batch {job.next_sequence} of {job_id}, the journal "
                    f"knows {known}",
                )
        self._is_checked = True

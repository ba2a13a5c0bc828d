"""One run on one chain: reach it, see that a ledger is there, then turn after turn."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

import msgspec
import structlog

from coordinator.core.settlement.sealing import SealingRule
from coordinator.shell.chain.escrow import EscrowBook
from coordinator.shell.chain.founding import (
    JobOrder,
    deploy,
    fill_account,
    open_job,
    raise_escrow,
)
from coordinator.shell.chain.mending.mender import Mender
from coordinator.shell.chain.pump import HaltError, Pump
from coordinator.shell.chain.reading.head import HeadWatch
from coordinator.shell.chain.sealer import Sealer
from coordinator.shell.chain.sending import Account
from coordinator.shell.chain.site import LedgerSite
from coordinator.shell.chain.turns import Turn
from coordinator.shell.clock import monotonic_ms
from coordinator.shell.journal.ledger.interface import Outbox
from hypergpu.chain.profiles import ChainProfile
from hypergpu.chain.rpc.answers import Block
from hypergpu.chain.rpc.chain import EvmChain
from hypergpu.chain.rpc.client import Rpc
from hypergpu.ids import Address, JobId
from hypergpu.ledger.typed import address_bytes
from hypergpu.refusal import Reason, RefusalError
from hypergpu.units import Milliseconds

log = structlog.get_logger()


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
    now_ms: Callable[[], Milliseconds] = monotonic_ms
    """By which clock a chain is found to stand still."""


class SettlerTurn(NamedTuple):
    """What one turn did."""

    turn: Turn
    """Of the pump."""
    sealed: int
    """Transactions, behind it."""
    taken: tuple[JobOrder, ...] = ()
    """Orders that need not be given again."""


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
        self._head = HeadWatch(options.profile.block_ms, options.now_ms)
        self._read_at = -1
        self._is_checked = False
        self._elsewhere: dict[JobId, str] = {}
        """Jobs that belong to another ledger, and why."""
        self._pump.is_mending = options.retries_failed
        self._mended_why = ""
        self.site = self._founded()
        self._sealer = Sealer(self.site, account, outbox, options.rule)
        self._mender = Mender(self._chain, account, outbox, self.site)

    @property
    def contract(self) -> Address:
        """The ledger's address."""
        return Address("0x" + self.site.contract.hex())

    def turn(self, orders: Iterable[JobOrder]) -> SettlerTurn:
        """Look at everything once and act.

        Args:
            orders: Jobs that are to be open, with their escrow; asked for when they are wanted.

        Raises:
            RpcError: the chain cannot be asked now.
            HaltError: sending has stopped for good.
            RefusalError: the ledger is not the one it should be.
        """
        turn = self._pumped()
        if still := self._head.complaint(turn):
            turn = turn._replace(complaints=(*turn.complaints, still))
        head = turn.head
        if any(event.topics[:1] == (self.site.skipped_topic,) for event in turn.events):
            self._sealer.is_reconcile_due = True
        self._check_once(turn)
        if self._pump.is_mending:
            complaints = (*turn.complaints, *filter(None, [self._mended_why]))
            return SettlerTurn(turn._replace(complaints=complaints), self._mended(turn))
        taken = tuple(orders)
        for order in taken:
            self._take(order, head)
        sealed = self._sealer.turn(head, turn.waiting)
        if head.number != self._read_at:
            self._escrow.watch(self._sealer.short)
            self._sealer.short.clear()
            self._escrow.look(self.site, head)
            self._read_at = head.number
        self._sealer.raise_doubt()
        complaints = (*turn.complaints, *self._elsewhere.values(), *self._escrow.shortfalls)
        return SettlerTurn(turn._replace(complaints=complaints), sealed, taken)

    def _take(self, order: JobOrder, head: Block) -> None:
        """Sign what an order needs, unless the job is another ledger's."""
        if why := self.site.why_elsewhere(order.job_id, order.signed_for):
            self._elsewhere[order.job_id] = why
            return
        self._escrow.follow(order.job_id)
        act = raise_escrow if self.site.is_opened(order.job_id) else open_job
        act(self.site, self._account, self.site.token(head), order, head)

    def close(self) -> None:
        """Let go of the connection."""
        self._chain.rpc.close()

    def _pumped(self) -> Turn:
        """A turn of the pump. What others have done in its place needs no operator."""
        try:
            return self._pump.turn()
        except HaltError:
            if self._pump.head is not None:
                self._mended_why = self._mender.done_by_others(self._pump.head)
            if not self._mended_why:
                raise
        log.warning("what failed is settled otherwise", reason=self._mended_why)
        self._pump.is_mending = True
        return self._pump.turn()

    def _mended(self, turn: Turn) -> int:
        """Go on without what failed, once everything behind it has spent its nonce."""
        if turn.waiting or turn.mined:
            return 0
        sealed = self._mender.mended(turn.head)
        if sealed is None:
            return 0
        self._pump.is_mending = False
        self._mended_why = ""
        return sealed

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
        is_passed_over = self._is_passed_over(next_nonce)
        fill_account(self._chain, self._account, profile)
        self._account.begin_at(next_nonce, self._chain.tip_wei())
        if is_passed_over:
            self._account.pass_over(next_nonce, self._chain.head())
        if options.contract is not None:
            site = self._site_at(address_bytes(options.contract))
            site.check(self._chain.head())
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

    def _is_passed_over(self, next_nonce: int) -> bool:
        """Whether somebody else has spent nonces behind those that are stored."""
        stored = self._outbox.next_nonce(self._account.name)
        if stored is None or next_nonce <= stored:
            return False
        deep = max(0, self._chain.head().number - self._options.profile.depth)
        deep_nonce = self._chain.next_nonce(self._account.address, deep)
        if not self._options.retries_failed or deep_nonce < next_nonce:
            raise RefusalError(
                Reason.LEDGER_AHEAD,
                f"chain {self._account.name.chain_id} has seen {next_nonce} transactions of "
                f"{self._account.name.address}, {deep_nonce} of them {self._options.profile.depth}"
                f" blocks deep; the journal knows {stored}",
                fix="use the newest journal; if this is it, stop whoever else sends with the key,"
                " and once all are deep start with: hypergpu up --retry-failed",
            )
        return True

    def _check_once(self, turn: Turn) -> None:
        """Check a ledger that was deployed here as soon as it is mined, and jobs' batches."""
        if self._is_checked or turn.waiting:
            return
        self.site.check(turn.head)
        for job_id in {record.epoch.job_id for record in self._outbox.epochs()}:
            job = self.site.job(job_id, turn.head)
            known = self._outbox.next_batch(self._account.name, job_id)
            if job is not None and job.next_sequence > known:
                raise RefusalError(
                    Reason.LEDGER_AHEAD,
                    f"the ledger expects batch {job.next_sequence} of {job_id}, the journal "
                    f"knows {known}",
                )
        self._is_checked = True

"""One run on one chain: reach it, see that a ledger is there, then turn after turn."""

from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
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
    wanted,
)
from coordinator.shell.chain.mending.mender import Mender
from coordinator.shell.chain.pump import HaltError, Pump
from coordinator.shell.chain.reading.head import HeadWatch
from coordinator.shell.chain.sealer import Sealer
from coordinator.shell.chain.sending import Account
from coordinator.shell.chain.site import LedgerSite
from coordinator.shell.chain.trying import Foresight, HeldOrder
from coordinator.shell.chain.turns import Turn
from coordinator.shell.clock import monotonic_ms
from coordinator.shell.journal.ledger.interface import Outbox
from hypergpu.chain.profiles import ChainProfile
from hypergpu.chain.rpc.answers import Block
from hypergpu.chain.rpc.chain import EvmChain
from hypergpu.chain.rpc.client import Rpc
from hypergpu.chain.rpc.errors import RpcRefusedError
from hypergpu.chain.sent.acts import ActFile
from hypergpu.chain.trial import OwnCall
from hypergpu.errors import HyperGPUError, Reason
from hypergpu.ids import Address, JobId
from hypergpu.ledger.typed import address_bytes
from hypergpu.units import Milliseconds, several

log = structlog.get_logger()

_SOONEST_BLOCKS = 2
"""What is signed now is in a block no sooner, as a rule."""
_LEDGER_PAUSED = (
    "the ledger's guardian has paused it: nothing more is recorded or paid until the pause is over;"
    " no receipt is lost"
)


class SettlingOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Which chain, which ledger, and how receipts reach it."""

    profile: ChainProfile
    rule: SealingRule
    contract: Address | None = None
    """A ledger that is there; None: one is deployed, on local chains only."""
    lock_folder: Path
    """Where keys are locked: one folder for all that may use them."""
    acts: ActFile | None = None
    """What an operator's commands sign with the same key; None: nobody gives any."""
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
    held: Mapping[JobId, HeldOrder] = {}
    """Orders that wait for the ledger to take them, with the reason."""


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
        self._was_over: frozenset[JobId] = frozenset()
        self._elsewhere: dict[JobId, str] = {}
        """Jobs that belong to another ledger, and why."""
        self._orders: dict[JobId, JobOrder] = {}
        self._to_look_at: dict[JobId, JobOrder] = {}
        """Of the orders, those that are new or were held, or of which something was given up."""
        self._held: dict[JobId, HeldOrder] = {}
        self._is_mending = options.retries_failed
        self._mended_why = ""
        self.note = ""
        """What whoever starts the coordinator is to know of its ledger."""
        self.site = self._founded()
        self._sealer = Sealer(self.site, account, outbox, options.rule)
        self._foresight = Foresight(self._chain, account, outbox, self.site)
        self._mender = Mender(self._chain, account, outbox, self.site, self._foresight)
        for job_id in self._unsettled():
            escrow.follow(job_id)

    def _unsettled(self) -> set[JobId]:
        """Jobs that are to be settled here whether or not anybody orders them again."""
        found = {record.epoch.job_id for record in self._outbox.epochs()}
        found |= self._outbox.waiting_counts().keys()
        return {job_id for job_id in found if self.site.is_opened(job_id)}

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
            HyperGPUError: the ledger is not the one it should be.
        """
        # What contracts said is lost with a turn that breaks off, and is not asked for again.
        is_due, self._sealer.is_reconcile_due = self._sealer.is_reconcile_due, True
        turn = self._pumped()
        is_skipped = any(event.topics[:1] == (self.site.skipped_topic,) for event in turn.events)
        self._sealer.is_reconcile_due = is_due or is_skipped or self._is_mending
        if still := self._head.complaint(turn):
            turn = turn._replace(complaints=(*turn.complaints, still))
        head = turn.head
        if turn.is_behind:
            return SettlerTurn(self._told(turn), 0, held=dict(self._held))
        self._check_once(turn)
        if self._is_mending:
            complaints = (*turn.complaints, *filter(None, [self._mended_why]))
            turn = turn._replace(complaints=complaints)
            return SettlerTurn(turn, self._mended(turn), held=dict(self._held))
        taken = tuple(orders)
        for order in taken:
            self._orders[order.job_id] = self._to_look_at[order.job_id] = order
        self._to_look_at = {
            job_id: order
            for job_id, order in self._to_look_at.items()
            if not self._is_taken(order, head)
        }
        # A replica that lacks the block refuses, and is no reason to seal nothing meanwhile.
        with suppress(RpcRefusedError):
            self._escrow.read(self.site, head)
        sealed = 0
        if not self._escrow.is_ledger_paused:
            sealed = self._sealer.turn(head, turn.waiting, self._over(head))
        if head.number != self._read_at:
            self._escrow.watch(self._sealer.short)
            self._sealer.short.clear()
            self._escrow.look(self.site, head)
            self._read_at = head.number
        return SettlerTurn(self._told(turn), sealed, taken, dict(self._held))

    def _over(self, head: Block) -> frozenset[JobId]:
        """Jobs of which nothing that is signed now would be recorded any more.

        The ledger's own window is known once it is checked.
        """
        if not self._is_checked:
            return frozenset()
        over = self._escrow.over(head.time_s)
        if over - self._was_over:
            self._sealer.is_reconcile_due = True
        self._was_over = over
        ahead_s = -(-_SOONEST_BLOCKS * self._options.profile.block_ms // 1_000)
        return self._escrow.over(head.time_s + ahead_s)

    def _told(self, turn: Turn) -> Turn:
        """The pump's turn with everything that waits, and why."""
        paused = (_LEDGER_PAUSED,) if self._escrow.is_ledger_paused else ()
        waiting = [*self._elsewhere.values(), *(one.complaint for one in self._held.values())]
        told = (*paused, *turn.complaints, *self._sealer.complaints, *waiting)
        unrecorded = self._escrow.unrecorded(turn.head.time_s)
        return turn._replace(complaints=(*told, *unrecorded, *self._escrow.shortfalls))

    def held(self, order: JobOrder, head: Block) -> HeldOrder | None:
        """Why the ledger would not take an order as things stand; None: nothing is known.

        Raises:
            RpcError: the chain cannot be asked.
        """
        intents = wanted(self.site, self._account, self._outbox, order)
        calls = [OwnCall(each.to, each.what.call) for each in intents]
        refused = self._foresight.refused(calls, head) if calls else None
        if refused is None:
            return None
        job_id = order.job_id
        what = f"{job_id} cannot be opened on the ledger with an escrow of {order.escrow}"
        if self.site.is_opened(job_id):
            what = f"the escrow of {job_id} cannot be raised to {order.escrow} on the ledger"
        why = f"{what}: {refused.words}"
        return HeldOrder(order, head.number, why, refused.fix, is_passing=refused.is_passing)

    def _is_taken(self, order: JobOrder, head: Block) -> bool:
        """Sign what an order needs. False: the ledger would refuse it, which is looked at again."""
        job_id = order.job_id
        if why := self.site.why_elsewhere(job_id, order.signed_for):
            self._elsewhere[job_id] = why
            return True
        self._escrow.follow(job_id)
        before = self._held.get(job_id)
        if before is not None and (before.order, before.height) == (order, head.number):
            return False
        if held := self.held(order, head):
            self._held[job_id] = held
            return False
        self._held.pop(job_id, None)
        if intents := wanted(self.site, self._account, self._outbox, order):
            self._account.seal(intents, head)
        return True

    def close(self) -> None:
        """Let go of the connection."""
        self._chain.rpc.close()

    def _pumped(self) -> Turn:
        """A turn of the pump. What mends itself needs no operator."""
        if self._is_mending:
            return self._pump.mend()
        try:
            return self._pump.turn()
        except HaltError as halt:
            if self._pump.head is not None:
                self._mended_why = self._mender.mends_itself(self._pump.head)
            if not self._mended_why:
                raise self._mender.explained(halt) from None
        log.warning("what failed needs no operator", reason=self._mended_why)
        self._is_mending = True
        return self._pump.mend()

    def _mended(self, turn: Turn) -> int:
        """Go on without what failed, once everything behind it has spent its nonce."""
        if turn.waiting or turn.mined:
            return 0
        if self._mended_why:
            # No operator has been told of it yet.
            self._mender.check_foreign()
        sealed = self._mender.mended(turn.head)
        if sealed is None:
            return 0
        self._is_mending = False
        self._mended_why = ""
        # Of what was given up some may be wanted still.
        self._to_look_at = dict(self._orders)
        return sealed

    def _founded(self) -> LedgerSite:
        """Reach the chain, check it, and see that there is a ledger."""
        profile, options = self._options.profile, self._options
        found = self._chain.chain_id()
        if found != profile.chain_id:
            raise HyperGPUError(
                Reason.CHAIN_WRONG,
                f"the RPC at {self._chain.where} is of chain {found}, not of {profile.chain_id}",
            )
        # Whatever else is wrong: what is no ledger is never told of as one.
        named = self._named()
        next_nonce = self._chain.next_nonce(self._account.address)
        if options.acts is not None and (acts := options.acts.of(self._account.name.address)):
            deep = max(0, self._chain.head().number - profile.depth)
            final = self._chain.next_nonce(self._account.address, deep)
            self._account.take_in(acts, next_nonce, final)
        is_passed_over = self._is_passed_over(next_nonce)
        fill_account(self._chain, self._account, profile)
        self._account.begin_at(next_nonce, self._chain.tip_wei())
        if is_passed_over:
            self._account.pass_over(next_nonce, self._chain.head())
        if named is not None:
            return named
        head = self._chain.head()
        return self._site_at(deploy(self._account, self._outbox, profile, head))

    def _named(self) -> LedgerSite | None:
        """The ledger that the options name, once it is seen to be one; None: one is deployed."""
        profile = self._options.profile
        if self._options.contract is None:
            if profile.is_local:
                return None
            detail = f"no ledger is named for chain {profile.chain_id}"
            raise HyperGPUError(Reason.LEDGER_WRONG, detail)
        site = self._site_at(address_bytes(self._options.contract))
        site.check(self._chain.head())
        return site

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
            raise HyperGPUError(
                Reason.LEDGER_AHEAD,
                f"chain {self._account.name.chain_id} has seen"
                f" {several(next_nonce, 'transaction')} of {self._account.name.address},"
                f" {deep_nonce} of them {several(self._options.profile.depth, 'block')} deep;"
                f" the journal knows {stored}",
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
                raise HyperGPUError(
                    Reason.LEDGER_AHEAD,
                    f"the ledger expects batch {job.next_sequence} of {job_id}, the journal "
                    f"knows {known}",
                )
        self.note = _bond_note(*self.site.bond(turn.head))
        self._is_checked = True


def _bond_note(posted: int, least: int) -> str:
    if posted >= least:
        return ""
    return (
        f"the coordinator's bond on the ledger is {posted}, and no job that pays is opened on less"
        f" than {least}: end the coordinator, hypergpu ledger bond, and start it again"
    )

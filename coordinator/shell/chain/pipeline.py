"""The thread that settles: it seals, sends and watches, and training never waits for it.

What it needs is in the journal, so it may be killed at any instant and started again. An RPC that
is down, slow, limited or wrong makes it rest and try again; a transaction that failed stops it.
"""

import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from typing import NamedTuple

import structlog

from coordinator.core.settlement.patience import rest_ms
from coordinator.core.settlement.sending import IN_A_BLOCK
from coordinator.shell.chain.escrow import EscrowBook
from coordinator.shell.chain.founding import JobOrder, funded_at
from coordinator.shell.chain.sending import Account
from coordinator.shell.chain.settler import Settler, SettlingOptions
from coordinator.shell.chain.site import DEPLOY_LEDGER, deployed_address, opening_purpose
from coordinator.shell.chain.trying import HeldOrder
from coordinator.shell.chain.turns import Turn
from coordinator.shell.journal.ledger.interface import Outbox
from coordinator.shell.journal.records import JournalError
from hypergpu.chain.keylock import KeyLock
from hypergpu.chain.rpc.client import Rpc
from hypergpu.chain.rpc.errors import RpcError, RpcLimitedError
from hypergpu.chain.signer import Signer
from hypergpu.errors import HyperGPUError, Reason
from hypergpu.ids import Address, JobId
from hypergpu.ledger.typed import Domain

log = structlog.get_logger()

_TURNS_A_BLOCK = 8
_TURN_MS_LEAST = 50
_TURN_MS_MOST = 1_000


class PipelineState(NamedTuple):
    """What anybody may know of the pipeline, of one instant."""

    contract: Address | None
    """The ledger; None until the first start has reached its chain."""
    height: int = 0
    """0: the chain was not reached since the start."""
    waiting: int = 0
    """Transactions in no block."""
    mined: int = 0
    """In a block, not yet final."""
    failures: int = 0
    """Of the RPC or the journal, in a row."""
    complaint: str = ""
    """What is wrong now; empty when nothing is."""
    halted: str = ""
    """Why nothing is settled any more; empty while all is well."""
    refusal: HyperGPUError | None = None
    """The same, where it is a refusal."""
    note: str = ""
    """What whoever starts the coordinator is to know of the ledger; empty: nothing."""


class Pipeline:
    """Settles what the journal holds on one chain, in a thread of its own."""

    def __init__(
        self, rpc: Callable[[], Rpc], signer: Signer, outbox: Outbox, options: SettlingOptions
    ) -> None:
        """Dial nothing yet.

        Args:
            rpc: Makes a connection to the chain; called in the pipeline's thread.
            signer: Of the account that owns the jobs and pays for gas.
            outbox: Of the journal.
            options: How.

        Raises:
            HyperGPUError: FOLDER_UNUSABLE, another process sends with this key.
        """
        self.account = Account(signer, outbox, options.profile)
        self.escrow = EscrowBook(outbox)
        known = deployed_address(outbox, self.account.name, DEPLOY_LEDGER)
        deployed = None if known is None else Address("0x" + known.hex())
        self.state = PipelineState(options.contract or deployed)
        self.held: Mapping[JobId, HeldOrder] = {}
        """Orders that wait for the ledger to take them, as of the newest turn."""
        self._lock = KeyLock(options.lock_folder, *self.account.name)
        self._rpc = rpc
        self._outbox = outbox
        self._options = options
        self._orders: dict[JobId, JobOrder] = {}
        self._asked: list[tuple[JobOrder, Future[HeldOrder | None]]] = []
        self._orders_lock = threading.Lock()
        """Of both."""
        self._woken = threading.Event()
        self._has_looked = threading.Event()
        self._is_stopping = False
        self._failures = 0
        self._settler: Settler | None = None
        self._thread = threading.Thread(target=self._run, name="settlement", daemon=True)

    @property
    def domain(self) -> Domain | None:
        """What receipts are signed for; None while no ledger is known."""
        contract = self.state.contract
        return None if contract is None else Domain(self.account.name.chain_id, contract)

    def start(self) -> None:
        """Begin, going on with whatever the journal holds."""
        self._thread.start()

    def wait_for_first_turn(self, within_s: float) -> None:
        """Return once a turn went well, or did not and `state` says why; or when time is up."""
        self._has_looked.wait(within_s)

    def stop(self, within_s: float = 30.0) -> None:
        """End after the turn that is being taken; the next start goes on from there."""
        self._is_stopping = True
        self._woken.set()
        if self._thread.ident is not None:
            self._thread.join(within_s)
        self._lock.release()

    def wake(self) -> None:
        """Something was journalled: look at once."""
        self._woken.set()

    def order(self, order: JobOrder) -> None:
        """See that a job is open on the ledger with its escrow, as soon as the chain is there.

        Safe to ask for again and again; a higher escrow than before is added to. The newest order
        of a job counts.
        """
        with self._orders_lock:
            self._orders[order.job_id] = order
        self._woken.set()

    def ask(self, order: JobOrder) -> "Future[HeldOrder | None]":
        """Why the ledger would not take an order as things stand; answered with the next turn."""
        answer: Future[HeldOrder | None] = Future()
        with self._orders_lock:
            self._asked.append((order, answer))
        self._woken.set()
        return answer

    def is_funded(self, job_id: JobId, escrow: int) -> bool:
        """Whether all of an escrow that was ordered is on the ledger, and was read there.

        Blocks: reads the journal.
        """
        block = funded_at(self._outbox, self.account.name, job_id, escrow)
        reading = self.escrow.reading(job_id)
        return block is not None and (reading is None or reading.height >= block)

    def has_signed(self) -> bool:
        """Whether anything was ever signed for the account. Blocks: reads the journal."""
        return self._outbox.next_nonce(self.account.name) is not None

    def is_opened(self, job_id: JobId) -> bool:
        """Whether a block has opened the job on the ledger. Blocks: reads the journal."""
        opening = self._outbox.transaction_for(self.account.name, opening_purpose(job_id))
        return opening is not None and opening.state in IN_A_BLOCK

    def _run(self) -> None:
        while not self._is_stopping:
            self._woken.clear()
            try:
                wait_ms = self._turn()
            except RpcError as error:
                asked_ms = error.wait_ms if isinstance(error, RpcLimitedError) else 0
                wait_ms = self._rest(str(error), asked_ms)
            except JournalError as error:
                wait_ms = self._rest(str(error))
            except HyperGPUError as error:
                if error.reason is not Reason.DISK_FULL:
                    self._halt(error)
                    break
                wait_ms = self._rest(error.message)
            except Exception as broken:
                # A thread that dies says nothing to anybody.
                log.exception("settling broke")
                self._halt(broken)
                break
            self._has_looked.set()
            self._woken.wait(wait_ms / 1000)
        self._has_looked.set()
        if self._settler is not None:
            self._settler.close()

    def _turn(self) -> int:
        """One turn. Returns how long to wait for the next, in milliseconds."""
        if self._settler is None:
            self._settler = Settler(
                self._rpc(), self.account, self._outbox, self._options, self.escrow
            )
        turn, sealed, taken, self.held = self._settler.turn(self._ordered())
        with self._orders_lock:
            self._orders = {
                job_id: order for job_id, order in self._orders.items() if order not in taken
            }
        self._failures = 0
        self._report(turn)
        self._answer(turn)
        # What was just signed does not wait for a whole turn.
        return 0 if sealed else self._wait_ms()

    def _ordered(self) -> Iterator[JobOrder]:
        """The orders as they stand when a turn comes to them, just before it looks at receipts.

        What is earned under a higher escrow is journalled after its order came: so the escrow is
        signed away first, and no epoch is closed without it.
        """
        with self._orders_lock:
            orders = tuple(self._orders.values())
        yield from orders

    def _answer(self, turn: Turn) -> None:
        with self._orders_lock:
            asked, self._asked = self._asked, []
        for order, answer in asked:
            if self._settler is not None and answer.set_running_or_notify_cancel():
                answer.set_result(self._settler.held(order, turn.head))

    def _report(self, turn: Turn) -> None:
        complaint = "; ".join(turn.complaints[:3])
        if complaint and complaint != self.state.complaint:
            log.warning("a transaction is not taken", reason=complaint)
        contract = None if self._settler is None else self._settler.contract
        self.state = PipelineState(
            contract=contract,
            height=turn.head.number,
            waiting=turn.waiting,
            mined=turn.mined,
            complaint=complaint,
            note="" if self._settler is None else self._settler.note,
        )

    def _rest(self, reason: str, asked_ms: int = 0) -> int:
        self._failures += 1
        if self._failures == 1:
            log.warning("settling waits", reason=reason)
        self.state = self.state._replace(failures=self._failures, complaint=reason)
        return rest_ms(self._failures, asked_ms)

    def _halt(self, error: Exception) -> None:
        log.critical("nothing is settled any more", reason=str(error))
        refusal = error if isinstance(error, HyperGPUError) else None
        why = str(error) if refusal is None else refusal.message
        self.state = self.state._replace(halted=why, complaint=why, refusal=refusal)

    def _wait_ms(self) -> int:
        each = self._options.profile.block_ms // _TURNS_A_BLOCK
        return min(max(each, _TURN_MS_LEAST), _TURN_MS_MOST)

"""The chain that settles what jobs owe, if one is configured: a pipeline, and Anvil where asked.

Training waits for none of it: a chain that is down is waited for, in a thread of its own.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from time import monotonic
from typing import Protocol

import structlog
from msgspec.structs import replace

from coordinator.config import Settings
from coordinator.core.job import ENDED, Job, LedgerSays, Phase
from coordinator.core.metering.accounts import owed_beyond, settled_at_most, voucher_holders
from coordinator.core.metering.budget import beyond_ledger, coming_cost, round_cost
from coordinator.core.settlement.sealing import Metering, SealingRule
from coordinator.shell.chain.escrow import Advanced
from coordinator.shell.chain.founding import JobOrder, fill_account
from coordinator.shell.chain.pipeline import Pipeline, PipelineState
from coordinator.shell.chain.settler import SettlingOptions
from coordinator.shell.journal.ledger.interface import Outbox
from coordinator.shell.journal.ledger.records import AccountName
from coordinator.shell.metering.chains import chain_of, ledger_unknown, remember
from coordinator.shell.metering.local_chain import LocalChain
from hypergpu.chain.keylock import usual_locks
from hypergpu.chain.rpc.client import HttpRpc
from hypergpu.chain.rpc.transport import HttpTransport
from hypergpu.chain.sent.acts import ActFile
from hypergpu.chain.signer import Signer
from hypergpu.errors import HyperGPUError, Reason
from hypergpu.ids import Address, Digest, JobId, NodeId
from hypergpu.jobfile.spec import JobSpec, Pay
from hypergpu.ledger.terms import Terms
from hypergpu.ledger.typed import Domain
from hypergpu.signature import IdentityKey
from hypergpu.units import Wei

log = structlog.get_logger()

_FOLDER = "chain"
_LOOK_EACH_S = 1.0
_UNPAID_LOOKS = 3
"""In so many blocks too little must be left: chain and journal are read one after the other."""
_BETWEEN_ROUNDS = frozenset({Phase.WAITING, Phase.PLANNING})
_NONE = Digest("0" * 64)
_NAMED_BY = {
    Reason.CHAIN_WRONG: "name that chain's own RPC: HYPERGPU_COORDINATOR_CHAIN_URL=URL; or the"
    " chain: HYPERGPU_CHAIN=CHAIN",
    Reason.LEDGER_WRONG: "name one of this version: HYPERGPU_COORDINATOR_LEDGER_CONTRACT=ADDRESS;"
    " or deploy one: hypergpu ledger deploy",
}
"""Whoever starts a coordinator with such a chain is told at once; nothing of it can come right."""


_DEPOSIT_WITHIN_S = 40.0
"""Less than a caller waits for an answer."""
_DEPOSIT_LOOK_EACH_S = 0.1
_ANSWER_WITHIN_S = 15.0
_LEDGER_WITHIN_S = 40.0
_FIRST_TURN_WITHIN_S = 2.0
Pause = Callable[[JobId, str], Awaitable[None]]
"""Of a job that cannot be paid for any longer, with the reason."""


class HasJob(Protocol):
    """A job in this process."""

    job: Job


class Settling:
    """Opens paid jobs on the ledger, settles them, and watches their escrow there."""

    def __init__(self, settings: Settings, key: IdentityKey, outbox: Outbox) -> None:
        """Start nothing yet.

        Raises:
            HyperGPUError: as `chain_of`; FOLDER_UNUSABLE, another process sends with this key.
        """
        folder = settings.data_dir / _FOLDER
        owner = Address(key.node_id)
        found = chain_of(
            settings, folder, lambda each: outbox.next_nonce(AccountName(each, owner)) is not None
        )
        profile, url, self.warning, self._is_assumed = found
        if self.warning:
            log.warning("something is assumed of the chain", reason=self.warning)
        self._folder = folder
        self._local: LocalChain | None = None
        if not url:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._local = LocalChain(
                folder,
                profile.chain_id,
                port=settings.chain_port,
                provide=lambda chain: fill_account(chain, self._pipeline.account, profile),
            )
            url = self._local.url
        self.url = url
        contract = Address(settings.ledger_contract) if settings.ledger_contract else None
        self._pipeline = Pipeline(
            lambda: HttpRpc(HttpTransport(url), profile.pace),
            Signer(key),
            outbox,
            SettlingOptions(
                profile=profile,
                rule=SealingRule(metering=Metering(settings.metering)),
                contract=contract,
                lock_folder=usual_locks(),
                acts=ActFile(settings.data_dir, profile.chain_id),
                retries_failed=settings.retry_failed,
            ),
        )
        self._ordered: dict[JobId, JobOrder] = {}
        self._unpaid: dict[JobId, tuple[int, int]] = {}
        self._raising: dict[JobId, int] = {}
        """Escrows that are being paid in, and are in no spec yet."""
        self._owed_at: dict[JobId, tuple[int, dict[NodeId, int]]] = {}
        """What a job owed for measured work when a reading of a height was first looked at."""

    def domain_for(self, pay: Pay) -> Domain:
        """What the receipts of a new job are signed for, once and for all: the ledger.

        It is named by the settings, or in the journal since it was deployed, so that a chain that
        is away stops no job. Before that, a job without pay is signed for no chain.

        Raises:
            HyperGPUError: the job pays, and CHAIN_UNREACHABLE, no ledger is known for sure;
                SENDING_HALTED, nothing is settled any more.
        """
        if pay.unit_price and (halted := self.state.halted):
            refusal = self.state.refusal
            raise HyperGPUError(
                Reason.SENDING_HALTED,
                "no job that pays is taken while nothing is settled:"
                f" {halted if refusal is None else refusal.detail}",
                fix="" if refusal is None else refusal.fix,
            )
        is_assumed = self._is_assumed and not self.state.height
        domain = None if is_assumed else self._pipeline.domain
        if domain is None and pay.unit_price:
            why = self.state.complaint or "it has not answered yet"
            raise ledger_unknown(self.account.chain_id, why, is_assumed=is_assumed)
        return domain or Domain()

    @property
    def account(self) -> AccountName:
        """Who sends, and where."""
        return self._pipeline.account.name

    @property
    def state(self) -> PipelineState:
        """How settling goes."""
        state = self._pipeline.state
        if self._local is None or not self._local.complaint:
            return state
        complaint = "; ".join(filter(None, (self._local.complaint, state.complaint)))
        return state._replace(complaint=complaint)

    @property
    def where(self) -> str:
        """The chain's RPC for people: without what may be a secret in its address."""
        return HttpTransport(self.url).where

    async def ledger(self) -> Address:
        """The ledger's address, as soon as it is known."""
        while True:
            if (contract := self.state.contract) is not None:
                return contract
            await asyncio.sleep(_LOOK_EACH_S)

    @property
    def note(self) -> str:
        """What whoever started the coordinator is to know of its chain; empty: nothing."""
        return "" if self._local is None else self._local.note

    def start(self, *, least_s: float = 0.0) -> None:
        """Begin. Blocks until the ledger is known, or the chain turns out not to answer.

        Args:
            least_s: A chain that says nothing at all is waited for so long at least.

        Raises:
            HyperGPUError: MACHINE_UNFIT, Anvil is not installed or does not start; CHAIN_WRONG or
                LEDGER_WRONG, what answers is not what was named.
        """
        if self._local is not None:
            self._local.start()
        # What is created from now on is to be signed for the ledger, and one that is only named may
        # be none; one that was settled on before can wait.
        within_s = _FIRST_TURN_WITHIN_S if self._pipeline.has_signed() else _LEDGER_WITHIN_S
        self._pipeline.start()
        self._pipeline.wait_for_first_turn(max(within_s, least_s))
        refusal = self.state.refusal
        if refusal is not None and refusal.reason in _NAMED_BY:
            self.stop()
            is_closer = refusal.fix != refusal.reason.value.fix
            fix = refusal.fix if is_closer else _NAMED_BY[refusal.reason]
            raise HyperGPUError(refusal.reason, refusal.detail, fix=fix)
        if self.state.height:
            remember(self._folder, self.url, self.account.chain_id)

    def stop(self) -> None:
        """End in good order. Blocks."""
        self._pipeline.stop()
        if self._local is not None:
            self._local.stop()

    def wake(self) -> None:
        """Receipts were journalled."""
        self._pipeline.wake()

    def order(self, job: Job) -> None:
        """See that a job that pays is open on the ledger with its escrow. Cheap: say it often.

        Said before a voucher is handed out, it has the escrow's reading find what that one took.
        """
        if self._order(job) is not None:
            advanced = Advanced(round_cost(job), voucher_holders(job))
            self._pipeline.escrow.expect(job.job_id, advanced)

    async def check(self, job_id: JobId, spec: JobSpec, terms: Terms) -> None:
        """See that the ledger would take a new job's escrow, as far as its chain answers soon.

        Raises:
            HyperGPUError: ESCROW_SHORT, it would not.
        """
        if not spec.pay.unit_price or self.state.failures:
            return
        asked = self._pipeline.ask(_order_of(job_id, spec, terms.domain))
        try:
            held = await asyncio.wait_for(asyncio.wrap_future(asked), _ANSWER_WITHIN_S)
        except TimeoutError:
            return
        if held is not None:
            fix = f"{held.fix}, and submit it again"
            raise HyperGPUError(Reason.ESCROW_SHORT, held.why, fix=fix)

    async def deposit(self, job: Job, escrow: int, *, within_s: float = _DEPOSIT_WITHIN_S) -> None:
        """See an escrow into a block, so that no work counts on it before it is there.

        Raises:
            HyperGPUError: ESCROW_SHORT, the ledger would refuse it, or the chain did not take it in
                time; what was signed for it stays on its way, and nothing more is.
        """
        self._raising[job.job_id] = escrow
        try:
            if (order := self._order(job)) is not None:
                await self._see_in(order, within_s)
        finally:
            # Its spec says the new one next, or never.
            del self._raising[job.job_id]
            self._order(job)

    async def _see_in(self, order: JobOrder, within_s: float) -> None:
        """Wait until all that an order wants is in a block."""
        job_id, escrow = order.job_id, order.escrow
        give_up_at_s = monotonic() + within_s
        while not await asyncio.to_thread(self._pipeline.is_funded, job_id, escrow):
            held = self._pipeline.held.get(job_id)
            if held is not None and held.order == order:
                raise HyperGPUError(Reason.ESCROW_SHORT, held.why, fix=held.fix)
            if self.state.halted or monotonic() >= give_up_at_s:
                raise HyperGPUError(
                    Reason.ESCROW_SHORT,
                    f"an escrow of {escrow} for {job_id} is not on the ledger yet, and no work"
                    f" counts on it before: {self.state.complaint or 'no block has taken it'}",
                    fix="set it again once blocks come; what was signed for it counts then",
                )
            await asyncio.sleep(_DEPOSIT_LOOK_EACH_S)

    def _order(self, job: Job) -> JobOrder | None:
        """Order the escrow of a job, unless that was the last. Less than is there changes nothing.

        Returns:
            The newest order; None: the job is not to be on the ledger, or not yet.
        """
        spec, model = job.spec, job.model
        if job.terms is None or not spec.pay.unit_price or model is None:
            return None
        escrow = max((job.next_spec or spec).escrow, self._raising.get(job.job_id, 0))
        before = self._ordered.get(job.job_id)
        if before is not None and before.escrow == escrow:
            return before
        order = replace(
            _order_of(job.job_id, spec, job.terms.domain),
            escrow=escrow,
            model=model.blob.digest,
            dataset=job.manifest.digest if job.manifest is not None else _NONE,
        )
        self._ordered[job.job_id] = order
        self._pipeline.order(order)
        return order

    def says(self, job: Job) -> LedgerSays | None:
        """What is known now of whether new work of a job can be paid; None: it pays nothing.

        What was earned since the ledger was read is taken off, at full quality, and what vouchers
        promise beyond; not again what a node that redeemed its voucher has had already.
        """
        if job.terms is None or not job.spec.pay.unit_price:
            return None
        reading = self._pipeline.escrow.reading(job.job_id)
        if reading is None:
            is_closed = self._is_shut(job) and not self._pipeline.is_opened(job.job_id)
            return LedgerSays(closed=self._why_shut(job) if is_closed else "")
        height, counted = self._owed_at.get(job.job_id, (-1, {}))
        if height != reading.height:
            counted = settled_at_most(job)
            for node, had in reading.had.items():
                counted[node] = max(had, counted.get(node, 0))
            self._owed_at[job.job_id] = (reading.height, counted)
        left = max(0, reading.left - owed_beyond(job, counted))
        says = LedgerSays(Wei(left), reading.height)
        if reading.ending is None:
            return says
        if reading.is_over:
            return replace(says, closed=reading.ending.over)
        return replace(says, ending=reading.ending.announced)

    def ending(self, job_id: JobId) -> tuple[str, str]:
        """A job's announced end for a list of jobs, and in full; empty: none is known."""
        reading = self._pipeline.escrow.reading(job_id)
        if reading is None or reading.ending is None:
            return "", ""
        said = reading.ending.over if reading.is_over else reading.ending.announced
        return reading.ending.brief, ". ".join(filter(None, [said, reading.unrecorded]))

    def _is_shut(self, job: Job) -> bool:
        held = self._pipeline.held.get(job.job_id)
        return bool(self.state.halted) or (held is not None and not held.is_passing)

    def _why_shut(self, job: Job) -> str:
        """Why nobody is going to be paid for a job that is not open on the ledger."""
        held = self._pipeline.held.get(job.job_id)
        if held is None or self.state.halted:
            return (
                f"{job.job_id} is not open on the ledger, and settling has stopped:"
                f" {self.state.halted}"
            )
        return f"{held.why}. Fix: {held.fix}, and resume the job"

    def unpaid(self, job: Job) -> str:
        """Why nobody is going to be paid for the rest of the job's open round; empty: it is.

        That the ledger has too little left counts once it was seen in several blocks. An opening
        that is on its way is waited for, unless the ledger would refuse it or settling has stopped.
        """
        _, ending = self.ending(job.job_id)
        if ending and job.phase in _BETWEEN_ROUNDS:
            return ending
        says = self.says(job) if _is_earning(job) else None
        why = beyond_ledger(job, says, coming_cost(job))
        if says is None or not why:
            # Who resumes it has raised the escrow, and that may take some blocks.
            self._unpaid.pop(job.job_id, None)
            return ""
        if says.closed:
            return why
        height, looks = self._unpaid.get(job.job_id, (-1, 0))
        if says.height > height:
            looks += 1
        self._unpaid[job.job_id] = (says.height, looks)
        return why if looks >= _UNPAID_LOOKS else ""

    async def watch(self, rooms: Mapping[JobId, HasJob], pause: Pause) -> None:
        """Order what is to be open, and report jobs that the ledger does not pay for."""
        while True:
            for room in list(rooms.values()):
                self.order(room.job)
                if why := self.unpaid(room.job):
                    await pause(room.job.job_id, why)
            await asyncio.sleep(_LOOK_EACH_S)


def _order_of(job_id: JobId, spec: JobSpec, signed_for: Domain) -> JobOrder:
    """What a job is opened with, but for what it works with."""
    return JobOrder(
        job_id=job_id,
        unit_price=spec.pay.unit_price,
        escrow=spec.escrow,
        guaranteed_bps=spec.pay.guaranteed_bps,
        epochs=-(-spec.training.rounds // spec.pay.rounds_per_epoch),
        model=_NONE,
        dataset=_NONE,
        signed_for=signed_for,
    )


def _is_earning(job: Job) -> bool:
    is_at_work = job.round is not None and job.phase not in ENDED | {Phase.PAUSED}
    return is_at_work and job.spec.pay.unit_price > 0

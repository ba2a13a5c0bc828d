"""Signs what is due: batches of receipts, closes of epochs, payments. Sends nothing itself."""

from collections.abc import Collection, Sequence
from typing import NamedTuple

import structlog

from coordinator.core.settlement.epoch import (
    Due,
    Epoch,
    EpochEnded,
    Part,
    PartSealed,
    due,
    transition,
)
from coordinator.core.settlement.sealing import SealingRule, Waiting, seal_reason
from coordinator.shell.chain.batches import (
    Group,
    batch_call,
    batch_record,
    by_job,
    groups,
    parted,
)
from coordinator.shell.chain.pump import HaltError
from coordinator.shell.chain.reading.payments import Payments
from coordinator.shell.chain.sending import Account, Intent, Sealing
from coordinator.shell.chain.site import LedgerSite
from coordinator.shell.clock import monotonic_ms
from coordinator.shell.journal.ledger.interface import Outbox
from coordinator.shell.journal.ledger.records import (
    BatchRecord,
    EpochRecord,
    Rewind,
    UnsealedReceipt,
)
from coordinator.shell.journal.records import JournalConflictError
from hypergpu.chain.gas import NODES_MAX
from hypergpu.chain.ledger import ContractCall
from hypergpu.chain.rpc.answers import Block
from hypergpu.chain.rpc.errors import RpcGarbledError, RpcRefusedError
from hypergpu.ids import JobId
from hypergpu.units import Milliseconds

log = structlog.get_logger()

_AT_ONCE = 50_000
"""Receipts looked at in one turn."""
_ASK_AGAIN_MS = 1_000
"""Of a doubtful epoch, at the same newest block."""
Key = tuple[JobId, int]


class _Doubt(NamedTuple):
    """An answer about an epoch that cannot be, or none."""

    block: bytes
    """Hash of the newest one."""
    at_ms: Milliseconds
    words: str


class _Plan:
    """What one turn signs, stored in one transaction."""

    def __init__(self, over: Collection[JobId]) -> None:
        self.over = over
        """Jobs of which nothing new is recorded any more: what they have is closed and paid."""
        self.intents: list[Intent] = []
        self.batches: list[tuple[int, BatchRecord]] = []
        self.epochs: dict[Key, Epoch] = {}
        self.rewinds: list[Rewind] = []
        self.waiting: set[Key] = set()
        """Epochs with receipts that are not sealed in this turn."""
        self.sees_all = True
        """Whether every receipt that waits was looked at."""

    def is_empty(self) -> bool:
        return not self.intents and not self.epochs and not self.rewinds


class Sealer:
    """Used by the pump's thread, between its turns."""

    def __init__(
        self, site: LedgerSite, account: Account, outbox: Outbox, rule: SealingRule
    ) -> None:
        self._site = site
        self._account = account
        self._outbox = outbox
        self._rule = rule
        self._since: dict[Key, Milliseconds] = {}
        """When receipts of an epoch were first seen to wait."""
        self._job_since: dict[JobId, Milliseconds] = {}
        """Of a job's receipts; no later than those of any of its epochs."""
        self._opened: set[JobId] = set()
        self._payments = Payments(site, outbox)
        self._doubts: dict[Key, _Doubt] = {}
        self.short: set[JobId] = set()
        """Jobs of which this process has found an epoch closed short."""
        self.is_reconcile_due = True
        """Whether the chain may count other receipts than were sealed: at a start, when it passed
        over a part of a batch, or a turn broke off that may have found that, and when a job is
        over, whose last may have been forced in."""

    def turn(self, head: Block, in_flight: int, over: frozenset[JobId] = frozenset()) -> int:
        """Seal what is due.

        Args:
            head: The newest block.
            in_flight: Transactions in no block.
            over: Jobs of which the ledger records nothing new any more.

        Returns:
            How many transactions were sealed.

        Raises:
            RpcError: the chain cannot be asked; nothing was sealed.
            HaltError: what is due does not follow on what was sealed before;
                nothing was sealed.
        """
        plan = _Plan(over)
        records = [one for one in self._outbox.epochs() if self._is_open(one.epoch.job_id)]
        if self.is_reconcile_due and not in_flight:
            self._reconcile(plan, {one.epoch.job_id for one in records}, head)
        if not plan.rewinds and self._is_any_due(plan, records, in_flight):
            self._seal_receipts(plan, in_flight)
        else:
            plan.sees_all = False
        self._advance_each(plan, records, head)
        if not plan.is_empty():
            self._store(plan, head)
        return len(plan.intents)

    def _store(self, plan: _Plan, head: Block) -> None:
        sealing = Sealing(tuple(plan.batches), tuple(plan.epochs.values()), tuple(plan.rewinds))
        try:
            self._account.seal(plan.intents, head, sealing)
        except JournalConflictError as error:
            if plan.rewinds:
                raise  # The chain counts what the journal lacks: its RPC may say otherwise later.
            raise HaltError(
                f"{error}: trying again cannot mend that",
                fix="keep the data folder as it is and report this: receipts are kept, and settled"
                " by a version that can",
            ) from None

    @property
    def complaints(self) -> tuple[str, ...]:
        """Which epochs wait for another answer of the chain's RPC, and why."""
        return tuple(doubt.words for doubt in self._doubts.values())

    def _advance_each(self, plan: _Plan, records: Sequence[EpochRecord], head: Block) -> None:
        """Advance every epoch that can be: who can make one doubtful must not stop them all."""
        before, self._doubts, now_ms = self._doubts, {}, monotonic_ms()
        for record in records:
            key = (record.epoch.job_id, record.epoch.number)
            doubt = before.get(key)
            if doubt and doubt.block == head.hash and now_ms < doubt.at_ms + _ASK_AGAIN_MS:
                self._doubts[key] = doubt
                continue
            try:
                self._advance(plan, record, head)
            except (RpcGarbledError, RpcRefusedError) as error:
                words = f"epoch {key[1]} of {key[0]} waits at block {head.number}: {error}"
                self._doubts[key] = _Doubt(head.hash, now_ms, words)

    def _is_open(self, job_id: JobId) -> bool:
        if job_id not in self._opened and self._site.is_opened(job_id):
            self._opened.add(job_id)
        return job_id in self._opened

    def _is_any_due(self, plan: _Plan, records: Sequence[EpochRecord], in_flight: int) -> bool:
        """Whether receipts are to be looked at one by one. Cheap, for most turns find none due.

        Never false where `_reason` would be given for a group: a job's receipts are at least as
        many and as old as those of any of its epochs.
        """
        counts = {
            job_id: count
            for job_id, count in self._outbox.waiting_counts().items()
            if job_id not in plan.over
        }
        records = [one for one in records if one.epoch.job_id not in plan.over]
        now_ms = monotonic_ms()
        self._job_since = {job_id: self._job_since.get(job_id, now_ms) for job_id in counts}
        if any(record.is_left and not record.epoch.is_ended for record in records):
            return True
        # What waits of a job without an open epoch came too late for its own. While the job is
        # still in one that somebody else has closed, there is none that takes it.
        going_on = {one.epoch.job_id for one in records if not one.epoch.is_ended}
        stuck = {one.epoch.job_id for one in records if one.epoch.is_ended and not one.is_left}
        waiting = [
            Waiting(
                receipts=count,
                oldest_age_ms=Milliseconds(now_ms - self._job_since[job_id]),
                is_ended=job_id not in going_on,
            )
            for job_id, count in counts.items()
            if self._is_open(job_id) and (job_id in going_on or job_id not in stuck)
        ]
        return any(seal_reason(each, in_flight, self._rule) for each in waiting)

    def _seal_receipts(self, plan: _Plan, in_flight: int) -> None:
        """Seal receipts that have waited enough."""
        unsealed = self._outbox.unsealed(_AT_ONCE, without=plan.over)
        plan.sees_all = len(unsealed) < _AT_ONCE
        for job_id, receipts in by_job(unsealed):
            if not self._is_open(job_id):
                continue
            every = self._outbox.epochs(is_final_too=True)
            of_job = [one for one in every if one.epoch.job_id == job_id]
            sequence = self._outbox.next_batch(self._account.name, job_id)
            is_held = False
            for group in groups(receipts, of_job):
                key = (job_id, group.epoch.number)
                # A node's receipts go in order: nothing overtakes a group that still waits.
                is_held = is_held or not self._reason(group, key, in_flight + len(plan.intents))
                room = 0 if is_held else self._rule.in_flight_max - in_flight - len(plan.intents)
                sealed = self._seal_group(plan, group, sequence, room)
                sequence += len(sealed)
                if sum(len(part) for part in sealed) < len(group.receipts):
                    is_held = True
                    plan.waiting.add(key)
                else:
                    self._since.pop(key, None)
            if not is_held:
                self._job_since.pop(job_id, None)

    def _reason(self, group: Group, key: Key, in_flight: int) -> str:
        now_ms = monotonic_ms()
        since_ms = self._since.setdefault(key, self._job_since.get(key[0], now_ms))
        waiting = Waiting(
            receipts=len(group.receipts),
            oldest_age_ms=Milliseconds(now_ms - since_ms),
            is_ended=group.is_left,
        )
        return seal_reason(waiting, in_flight, self._rule)

    def _seal_group(
        self, plan: _Plan, group: Group, sequence: int, room: int
    ) -> list[tuple[UnsealedReceipt, ...]]:
        """Seal at most ``room`` batches of a group. Returns what went into each."""
        sealed: list[tuple[UnsealedReceipt, ...]] = []
        epoch = group.epoch
        job = self._site.job_key(epoch.job_id)
        for part in parted(group.receipts, self._rule.metering, self._rule.receipts_max):
            if len(sealed) >= room:
                break
            record = batch_record(self._account.name, epoch, part, sequence + len(sealed))
            call = batch_call(self._site.calls, job, record, part, self._rule.metering)
            plan.batches.append((len(plan.intents), record))
            purpose = f"batch/{epoch.job_id}/{record.sequence}"
            plan.intents.append(self._intent(purpose, call, epoch, Part.BATCH))
            nodes = tuple(span.node for span in record.spans)
            epoch = transition(epoch, PartSealed(Part.BATCH, len(part), nodes))
            sealed.append(part)
        if sealed:
            plan.epochs[epoch.job_id, epoch.number] = epoch
        return sealed

    def _advance(self, plan: _Plan, record: EpochRecord, head: Block) -> None:
        """End an epoch whose receipts are all sealed, and seal what it needs next."""
        key = (record.epoch.job_id, record.epoch.number)
        before = epoch = plan.epochs.get(key, record.epoch)
        is_all_sealed = plan.sees_all and not plan.rewinds and key not in plan.waiting
        takes_no_more = epoch.job_id in plan.over and not plan.rewinds
        if (takes_no_more or (record.is_left and is_all_sealed)) and not epoch.is_ended:
            epoch = transition(epoch, EpochEnded())
        if epoch.is_count_due:
            epoch = transition(epoch, self._payments.counted(epoch, head))
        if epoch.is_check_due:
            epoch = transition(epoch, self._payments.checked(epoch, head))
        sweeps = NODES_MAX if self._site.profile.sweeps_dust else 0
        while (wanted := due(epoch, head.time_s, sweeps=sweeps)) is not None:
            log.debug("sealed", part=wanted.part.value, reason=wanted.reason)
            epoch = self._seal_due(plan, epoch, wanted, head)
        if epoch != before:
            plan.epochs[key] = epoch
            if epoch.short:
                self.short.add(epoch.job_id)

    def _seal_due(self, plan: _Plan, epoch: Epoch, wanted: Due, head: Block) -> Epoch:
        job = self._site.job_key(epoch.job_id)
        name = f"{epoch.job_id}/{epoch.number}"
        if wanted.part is Part.CLOSE:
            call = self._site.calls.close(job, epoch.number)
            plan.intents.append(self._intent(f"close/{name}", call, epoch, Part.CLOSE))
        elif wanted.part is Part.SWEEP:
            call = self._site.calls.sweep(job, epoch.number, epoch.nodes)
            plan.intents.append(self._intent(f"sweep/{name}", call, epoch, Part.SWEEP))
        else:
            is_first = not epoch.payment.sealed
            payees = epoch.nodes if is_first else self._payments.still_due(epoch, head)
            if not payees:
                return transition(epoch, self._payments.counted(epoch, head))
            # Numbered by all there were: some may be given up, and later ones not.
            number = len(self._site.purposes(f"pay/{name}/"))
            for first in range(0, len(payees), NODES_MAX):
                call = self._site.calls.pay(job, epoch.number, payees[first : first + NODES_MAX])
                purpose = f"pay/{name}/{number + first // NODES_MAX}"
                plan.intents.append(self._intent(purpose, call, epoch, Part.PAYMENT))
                epoch = transition(epoch, PartSealed(Part.PAYMENT))
            return epoch
        return transition(epoch, PartSealed(wanted.part))

    def _reconcile(self, plan: _Plan, jobs: set[JobId], head: Block) -> None:
        """Set what counts as sealed to what the chain counts, with nothing on its way.

        Raises:
            RpcGarbledError: it counts none of a node's receipts. One that forced them in before
                their batch has some; the batch of any other has recorded them.
        """
        for job_id in jobs:
            sealed = self._outbox.sealed_counts(job_id)
            nodes = sorted(node for node, count in sealed.items() if count)
            for node, counted in zip(nodes, self._site.counted(job_id, nodes, head), strict=True):
                if not counted:
                    raise RpcGarbledError(
                        f"the chain's RPC counts no receipt of {node} in {job_id} at block "
                        f"{head.number}, which holds {sealed[node]}"
                    )
                if counted != sealed[node]:
                    log.warning(
                        "the chain counts other receipts than were sent",
                        job_id=job_id,
                        node=node,
                        counted=counted,
                        sent=sealed[node],
                    )
                    plan.rewinds.append(Rewind(job_id, node, counted))
        self.is_reconcile_due = False

    def _intent(self, purpose: str, call: ContractCall, epoch: Epoch, part: Part) -> Intent:
        return Intent(purpose, self._site.contract, call, epoch.job_id, epoch.number, part)

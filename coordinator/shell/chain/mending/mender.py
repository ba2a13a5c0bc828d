"""Gives up transactions that can never take effect, and lets what they were for be signed afresh.

Two guards, each enough by itself, keep anything from being paid twice. The nonce of each is spent
on something else, so deep that its block stays; and the ledger's sequence stands where their first
batch did, so that none of their batches is recorded there. Where an RPC cannot tell what a nonce is
spent on, the ledger tells of batches and openings; of other deposits nothing does, and nothing is
signed again.
"""

from collections.abc import Iterable, Sequence

import structlog

from coordinator.core.settlement.epoch import Epoch, Part
from coordinator.core.settlement.mending import Kept, remade
from coordinator.core.settlement.refused import Failure
from coordinator.core.settlement.sending import IN_A_BLOCK, TransactionState
from coordinator.shell.chain.founding import approval_again
from coordinator.shell.chain.mending.ended import ended_before
from coordinator.shell.chain.mending.receiptless import Receiptless
from coordinator.shell.chain.pump import FOREIGN_FIX, HaltError
from coordinator.shell.chain.sending import Account, Intent, Sealing, is_act
from coordinator.shell.chain.site import DEPLOY_LEDGER, DEPLOY_TOKEN, LedgerSite
from coordinator.shell.chain.trying import Foresight
from coordinator.shell.journal.ledger.interface import Outbox
from coordinator.shell.journal.ledger.records import BatchRecord, OutboxRow, Rewind
from hypergpu.chain.ledger import EpochOnChain
from hypergpu.chain.rpc.answers import Block
from hypergpu.chain.rpc.chain import EvmChain
from hypergpu.chain.rpc.errors import RpcError, RpcGarbledError
from hypergpu.chain.trial import OwnCall
from hypergpu.errors import HyperGPUError, Reason
from hypergpu.ids import JobId, NodeId

log = structlog.get_logger()

_CLOSABLE = frozenset({Part.BATCH.value, Part.CLOSE.value})
_CLOSED = (
    "somebody else has closed epoch {} of {} on the ledger, as anybody may once it was open for the"
    " unbonding time: its receipts that were not recorded by then are settled with the next epoch"
)
_SWEPT = (
    "somebody else has swept the dust of epoch {} of {} into its job's escrow, as anybody may:"
    " nothing of it is left to be done"
)
_BY_ACT = (
    "an operator's command has used nonce {} before {}, which waited for a block: it is signed"
    " again"
)
_ACT = "{} of an operator's command failed: it is not sent again, and nothing else waits for it"
_LATER = "{} was refused, since {}: it goes again once that is over"
_ONE_JOB = "{} is left aside, since {} was refused: {}. Other jobs are settled as ever"


class Mender:
    """Used by the pipeline's thread."""

    def __init__(
        self,
        chain: EvmChain,
        account: Account,
        outbox: Outbox,
        site: LedgerSite,
        foresight: Foresight,
    ) -> None:
        self._chain = chain
        self._account = account
        self._outbox = outbox
        self._site = site
        self._foresight = foresight
        self._receiptless = Receiptless(chain, account, outbox, site)

    def mends_itself(self, head: Block) -> str:
        """Why what failed needs no operator: it is settled otherwise, goes later, or is one job's.

        Empty: it needs one.

        Args:
            head: The newest block.

        Raises:
            RpcError: the chain cannot be asked.
        """
        if why := self._done_by_others(head):
            return why
        first = next(iter(self._failed()), None)
        if why := self._of_acts(first):
            return why
        if why := ended_before(first, self._site, self._outbox, head):
            return why
        failure = self._failure(first)
        if first is None or failure is None:
            return ""
        if failure.is_passing:
            return _LATER.format(first.transaction.purpose, failure.words)
        job_id = first.transaction.job_id
        if job_id is None or first.transaction.part:
            return ""
        # What would be refused again is not signed again, so that this comes to an end.
        again = self._with_approvals([first])
        refused = self._foresight.refused([_own_call(each) for each in again], head)
        return _ONE_JOB.format(job_id, first.transaction.purpose, refused.words) if refused else ""

    def _of_acts(self, first: OutboxRow | None) -> str:
        """What failed because of an operator's commands, in words; or empty."""
        if first is None:
            return ""
        if first.block is not None:
            return _ACT.format(first.transaction.purpose) if is_act(first.transaction) else ""
        if not self._receiptless.is_by_act(first):
            return ""
        return _BY_ACT.format(first.transaction.nonce, first.transaction.purpose)

    def check_foreign(self) -> None:
        """See that nothing failed because somebody else has used its nonce.

        Raises:
            HaltError: something did.
            RpcError: the chain cannot be asked.
        """
        for row in self._failed():
            if row.block is None and not self._receiptless.is_by_act(row):
                raise HaltError(
                    f"nonce {row.transaction.nonce} of {self._account.name.address}"
                    f" ({row.transaction.purpose}) was used by a transaction that this coordinator"
                    " did not sign",
                    fix=FOREIGN_FIX,
                )

    def explained(self, halt: HaltError) -> HaltError:
        """The same halt with what the contract said, as far as that can be found out."""
        try:
            failure = self._failure(next(iter(self._failed()), None))
        except RpcError:
            return halt
        if failure is None:
            return halt
        return HaltError(f"{halt.detail}. It failed since {failure.words}", fix=failure.fix)

    def _failure(self, row: OutboxRow | None) -> Failure | None:
        if row is None or row.block is None or row.attempts[-1].attempt.is_void:
            return None
        return self._foresight.failure(row)

    def _done_by_others(self, head: Block) -> str:
        """What failed because somebody else has closed or swept its epoch, in words; or empty."""
        first = next(iter(self._failed()), None)
        if first is None or first.block is None or first.transaction.job_id is None:
            return ""
        if head.number < first.block.number:
            raise RpcGarbledError(
                f"the newest block that the chain's RPC at {self._chain.where} has is "
                f"{head.number}, and something failed in block {first.block.number}"
            )
        job_id, number = first.transaction.job_id, first.transaction.epoch
        if first.transaction.part == Part.SWEEP.value:
            # An epoch has one sweep of ours, which failed.
            is_swept = self._on_chain(job_id, number, head).is_swept
            return _SWEPT.format(number, job_id) if is_swept else ""
        if first.transaction.part not in _CLOSABLE:
            return ""
        # Asked first: a close of ours that is in it has a receipt by then.
        is_closed = self._on_chain(job_id, number, head).closed_at_s > 0
        if not is_closed or self._has_closed(f"close/{job_id}/{number}"):
            return ""
        return _CLOSED.format(number, job_id)

    def mended(self, head: Block) -> int | None:
        """Give up what failed, once nothing of the account is on its way.

        Args:
            head: The newest block.

        Returns:
            How many transactions were signed again; None: a spent nonce is not deep enough yet.

        Raises:
            RpcError: the chain cannot be asked; nothing was changed.
            HyperGPUError: LEDGER_AHEAD, the ledger has recorded what was to be given up;
                SENDING_HALTED, it made the ledger itself, or may be a deposit that took effect.
        """
        failed = self._failed()
        if not failed:
            return 0
        deep = max(0, head.number - self._site.profile.depth)
        if self._chain.next_nonce(self._account.address, deep) <= failed[-1].transaction.nonce:
            return None
        lost = self._receiptless.left_out(failed, head)
        return None if lost is None else self._given_up(lost, head)

    def _given_up(self, failed: Sequence[OutboxRow], head: Block) -> int:
        if not failed:
            return 0
        _check_founding(failed)
        if self._needs_more_gas(failed[0], head):
            self._account.use_more_gas()
        for row in failed:
            if is_act(row.transaction):
                log.warning("a command's transaction is given up", what=row.transaction.purpose)
        given_up = {row.transaction.nonce for row in failed}
        epochs: list[Epoch] = []
        rewinds: list[Rewind] = []
        for job_id in dict.fromkeys(row.transaction.job_id for row in failed):
            if job_id is not None:
                batches = self._batches(job_id)
                kept = [batch for batch in batches if batch.nonce not in given_up]
                self._check_sequence(job_id, kept, head)
                epochs += self._epochs(job_id, kept, head)
                rewinds += self._rewinds(job_id, batches, head)
        left = Sealing(epochs=tuple(epochs), rewinds=tuple(rewinds))
        return self._account.seal_again(failed, self._again(failed, head), head, left)

    def _failed(self) -> tuple[OutboxRow, ...]:
        return self._outbox.transactions(self._account.name, states=[TransactionState.FAILED])

    def _again(self, failed: Sequence[OutboxRow], head: Block) -> list[Intent | OutboxRow]:
        """What is signed once more: what belongs to no epoch, unless its job's is refused now.

        Nor what an operator's command signed: who gave it sees what came of it, and gives it again.
        """
        found: list[Intent | OutboxRow] = []
        rows = [row for row in failed if not (row.transaction.part or is_act(row.transaction))]
        for job_id in dict.fromkeys(row.transaction.job_id for row in rows):
            of_job = [row for row in rows if row.transaction.job_id == job_id]
            again = self._with_approvals(of_job)
            calls = [_own_call(each) for each in again]
            before = [_own_call(each) for each in found]
            refused = self._foresight.refused(calls, head, before) if job_id else None
            if refused is None:
                found += again
            else:
                log.warning("what failed is not signed again", job_id=job_id, reason=refused.words)
        return found

    def _with_approvals(self, rows: Sequence[OutboxRow]) -> list[Intent | OutboxRow]:
        """With an approval in front of each that has none of its own there."""
        found: list[Intent | OutboxRow] = []
        before = b""
        for row in rows:
            approval = approval_again(self._site, row)
            if approval is not None and approval.what.call != before:
                found.append(approval)
            found.append(row)
            before = row.transaction.call
        return found

    def _needs_more_gas(self, first: OutboxRow, head: Block) -> bool:
        """Whether it may have failed for want of gas: it was in a block, and as it was meant."""
        is_void = first.attempts[-1].attempt.is_void
        is_alone = is_void or is_act(first.transaction)
        if first.block is None or is_alone or self._done_by_others(head):
            return False
        failure = self._failure(first)
        return failure is None or failure.is_starved

    def _on_chain(self, job_id: JobId, number: int, head: Block) -> EpochOnChain:
        return self._site.epoch(Epoch(job_id=job_id, number=number), head)

    def _has_closed(self, purpose: str) -> bool:
        close = self._outbox.transaction_for(self._account.name, purpose)
        if close is None:
            return False
        places = self._chain.inclusions(
            [each.attempt.hash for each in close.attempts if not each.attempt.is_void]
        )
        return any(place is not None and place.is_success for place in places)

    def _batches(self, job_id: JobId) -> list[BatchRecord]:
        return [
            batch for batch in self._outbox.batches(job_id) if batch.account == self._account.name
        ]

    def _check_sequence(self, job_id: JobId, kept: Sequence[BatchRecord], head: Block) -> None:
        job = self._site.job(job_id, head)
        recorded = 0 if job is None else job.next_sequence
        known = max((batch.sequence + 1 for batch in kept if batch.sequence is not None), default=0)
        if recorded != known:
            raise HyperGPUError(
                Reason.LEDGER_AHEAD,
                f"the ledger expects batch {recorded} of {job_id}, and the journal knows of "
                f"{known} that are recorded: nothing of the job is signed again",
            )

    def _epochs(self, job_id: JobId, kept: Iterable[BatchRecord], head: Block) -> list[Epoch]:
        """The job's epochs as they are without what is given up."""
        by_nonce = {batch.nonce: batch for batch in kept}
        rows = [
            row
            for row in self._outbox.transactions(self._account.name, states=[*IN_A_BLOCK])
            if row.transaction.job_id == job_id and row.transaction.part
        ]
        epochs = []
        for record in self._outbox.epochs(is_final_too=True):
            if record.epoch.job_id != job_id:
                continue
            number = record.epoch.number
            found = [
                _kept(row, by_nonce.get(row.transaction.nonce))
                for row in rows
                if row.transaction.epoch == number
            ]
            says = self._on_chain(job_id, number, head)
            is_closed, is_swept = says.closed_at_s > 0, says.is_swept
            epochs.append(remade(record.epoch, found, is_closed=is_closed, is_swept=is_swept))
        return epochs

    def _rewinds(self, job_id: JobId, batches: Iterable[BatchRecord], head: Block) -> list[Rewind]:
        nodes: list[NodeId] = sorted({span.node for batch in batches for span in batch.spans})
        counted = self._site.counted(job_id, nodes, head)
        return [Rewind(job_id, node, count) for node, count in zip(nodes, counted, strict=True)]


def _own_call(signed: Intent | OutboxRow) -> OwnCall:
    if isinstance(signed, Intent):
        return OwnCall(signed.to, signed.what.call)
    return OwnCall(signed.transaction.to, signed.transaction.call)


def _kept(row: OutboxRow, batch: BatchRecord | None) -> Kept:
    part = Part(row.transaction.part)
    if batch is None:
        return Kept(part, row.state)
    return Kept(
        part,
        row.state,
        receipts=sum(span.receipts for span in batch.spans),
        nodes=tuple(span.node for span in batch.spans),
    )


def _check_founding(failed: Iterable[OutboxRow]) -> None:
    for row in failed:
        if row.transaction.purpose in {DEPLOY_TOKEN, DEPLOY_LEDGER}:
            raise HyperGPUError(
                Reason.SENDING_HALTED,
                f"transaction {row.transaction.nonce} ({row.transaction.purpose}) is not signed "
                "again: what it makes has its address by its nonce",
                fix="start on a chain of its own with another data folder",
            )

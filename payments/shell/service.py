"""PaymentsService: the ledger of a job for its users, and an operator's orders about it."""

from collections.abc import AsyncIterator, Iterable, Iterator
from typing import TYPE_CHECKING

from hypergpu.errors import HyperGPUError, Reason
from hypergpu.extension import LedgerCaller
from hypergpu.ids import JobId, NodeId
from hypergpu.journal.worth import worth
from hypergpu.units import Wei
from hypergpu.v1 import payments_pb2 as pb
from hypergpu.wire.messages import receipt_message, terms_message
from payments.core.ledger import LedgerState
from payments.core.settlement import ReclaimOrder
from payments.core.transactions import (
    AccountView,
    JobOnLedger,
    OutboxRow,
    ShareState,
    ShareView,
)
from payments.shell.projection import Projection
from payments.shell.store import PaymentStore

if TYPE_CHECKING:
    # It needs web3, of the extra [chain].
    from payments.shell.connection import ChainConnection
    from payments.shell.settlement import Settler
    from payments.shell.transactions import TransactionQueue

_RECEIPTS_AT_ONCE = 100
_NO_SHARE = ShareView(ShareState.NONE, Wei(0))

_STATES = {ShareState.PAID: "paid", ShareState.VOID: "void", ShareState.NONE: "measured"}


class PaymentsServicer:
    """Answers from the projection, the store and the last tick's view of the chain."""

    def __init__(
        self, projection: Projection, store: PaymentStore, connection: "ChainConnection | None"
    ) -> None:
        self._projection = projection
        self._store = store
        self._connection = connection

    async def get_ledger(
        self, request: pb.GetLedgerRequest, caller: LedgerCaller
    ) -> pb.GetLedgerResponse:
        state = await self._state(request.job_id)
        settler = self._connection.settler if self._connection else None
        view = settler.views.get(state.job_id) if settler else None
        scores = self._store.epoch_scores(state.job_id)
        answer = pb.GetLedgerResponse(
            terms=terms_message(state.terms, state.ended_epochs),
            unit_price=str(state.unit_price),
            escrow=str(state.escrow),
            is_over=state.is_over,
            open_epoch=state.ended_epochs,
            unit=state.terms.unit.value,
            nodes=[
                _node(state, node, scores.get(node, {}), view)
                for node in _visible_nodes(state, caller)
            ],
        )
        for node in answer.nodes:
            node.name = self._projection.node_name(NodeId(node.node_id))
        if self._connection is not None and settler is not None:
            self._describe_settlement(answer, state, self._connection, settler)
        return answer

    async def list_receipts(
        self, request: pb.ListReceiptsRequest, caller: LedgerCaller
    ) -> AsyncIterator[pb.ListReceiptsResponse]:
        state = await self._state(request.job_id)
        for node in _visible_nodes(state, caller):
            first = 0
            while receipts := self._store.receipts(state.job_id, node, first, _RECEIPTS_AT_ONCE):
                first = receipts[-1].receipt.sequence + 1
                messages = [receipt_message(signed_receipt) for signed_receipt in receipts]
                yield pb.ListReceiptsResponse(node_id=node, receipts=messages)

    async def request_reclaim(
        self, request: pb.RequestReclaimRequest, caller: object
    ) -> pb.RequestReclaimResponse:
        purpose = await self._order_reclaim(request.job_id, ReclaimOrder.ANNOUNCE)
        return pb.RequestReclaimResponse(purpose=purpose)

    async def reclaim(self, request: pb.ReclaimRequest, caller: object) -> pb.ReclaimResponse:
        purpose = await self._order_reclaim(request.job_id, ReclaimOrder.TAKE)
        return pb.ReclaimResponse(purpose=purpose)

    async def retry_halted(
        self, request: pb.RetryHaltedRequest, caller: object
    ) -> pb.RetryHaltedResponse:
        state = await self._state(request.job_id)
        purposes = await self._settler(state).retry(state.job_id)
        return pb.RetryHaltedResponse(purposes=purposes)

    async def _order_reclaim(self, job_id: str, order: ReclaimOrder) -> str:
        state = await self._state(job_id)
        settler = self._settler(state)
        if not state.is_over:
            raise HyperGPUError(
                Reason.JOB_PHASE,
                f"{job_id} has not ended: its escrow still pays for work",
                fix="stop the job first: hypergpu job stop JOB",
            )
        settler.order_reclaim(state.job_id, order)
        name = "request-reclaim" if order is ReclaimOrder.ANNOUNCE else "reclaim"
        return f"{name}/{state.job_id}"

    async def _state(self, job_id: str) -> LedgerState:
        state = await self._projection.begun_state(JobId(job_id))
        if state is None:
            raise HyperGPUError(Reason.JOB_UNKNOWN, f"there is no job {job_id[:40]!r}")
        return state

    def _settler(self, state: LedgerState) -> "Settler":
        if self._connection is None or self._connection.settler is None:
            raise HyperGPUError(Reason.CHAIN_UNREACHABLE, "no chain settles here now")
        if state.terms.domain != self._connection.domain:
            raise HyperGPUError(
                Reason.LEDGER_WRONG, f"{state.job_id} is signed for another ledger or for none"
            )
        return self._connection.settler

    def _describe_settlement(
        self,
        answer: pb.GetLedgerResponse,
        state: LedgerState,
        connection: "ChainConnection",
        settler: "Settler",
    ) -> None:
        job_id, head = state.job_id, settler.head
        halt = settler.halts.get(job_id) or settler.halts.get(None)
        answer.halted = str(halt or "")
        answer.unfunded = settler.waiting.get(job_id, "")
        stored_rows = self._store.job_rows(connection.queue.account, job_id)
        known_rows = {row.nonce: row for row in connection.queue.rows}
        rows = [known_rows.get(row.nonce, row) for row in stored_rows]
        answer.transactions.extend(_transactions(rows, connection.queue))
        view = settler.views.get(job_id)
        if view is None or head is None:
            return
        answer.on_chain.CopyFrom(
            pb.LedgerOnChain(
                url=connection.chain.where,
                block=head.number,
                block_time_unix_s=view.time_s,
                is_open=view.is_open,
                free_escrow=str(view.free),
                batches=view.next_sequence,
                ends_at_unix_s=view.ends_at_s,
                token=connection.addresses.token,
                decimals=connection.decimals,
            )
        )


def _visible_nodes(state: LedgerState, caller: LedgerCaller) -> list[NodeId]:
    own = caller.own_nodes
    return sorted(node for node in state.nodes if own is None or node in own)


def _node(
    state: LedgerState, node: NodeId, scores: dict[int, int], view: JobOnLedger | None
) -> pb.LedgerNode:
    tally = state.nodes[node]
    message = pb.LedgerNode(
        node_id=node,
        receipts=tally.count,
        samples=tally.samples,
        total_score=tally.total_score,
        worth=str(worth(state.unit_price, tally.total_score)),
        shares=_shares(node, _epoch_scores(state, scores, view), view),
    )
    if view is not None:
        account = view.accounts.get(node, AccountView())
        shares = [epoch.shares.get(node, _NO_SHARE) for epoch in view.epochs.values()]
        unpaid_amount = sum(share.amount for share in shares if share.state is not ShareState.PAID)
        message.allotted, message.paid = str(account.earned), str(account.earned - unpaid_amount)
    return message


def _epoch_scores(
    state: LedgerState, scores: dict[int, int], view: JobOnLedger | None
) -> dict[int, int]:
    """Scores by epoch; of a farm job, whose receipts are all signed for epoch 0, those of epochs on
    the ledger are not told one by one.
    """
    if not state.is_farm or view is None:
        return scores
    return {**dict.fromkeys(view.epochs, 0), **scores}


def _shares(
    node: NodeId, scores: dict[int, int], view: JobOnLedger | None
) -> Iterator[pb.LedgerShare]:
    for number, score in sorted(scores.items()):
        state, amount = share_state(node, number, view)
        yield pb.LedgerShare(epoch=number, score=score, state=state, amount=amount)


def share_state(node: NodeId, number: int, view: JobOnLedger | None) -> tuple[str, str]:
    """State and amount of a share; the amount of one that was settled long ago is not kept."""
    if view is None or not view.is_open:
        return "measured", ""
    epoch = view.epochs.get(number)
    if epoch is None:
        return "paid" if number < view.paid_below else "measured", ""
    share = epoch.shares.get(node, _NO_SHARE)
    if share.state is ShareState.DUE:
        return "closed" if epoch.closed_at_s else "recorded", str(share.amount)
    return _STATES[share.state], str(share.amount)


def _transactions(
    rows: Iterable[OutboxRow], queue: "TransactionQueue"
) -> Iterator[pb.LedgerTransaction]:
    for row in rows:
        inclusion = row.inclusion
        yield pb.LedgerTransaction(
            hash="0x" + (inclusion.hash if inclusion else row.variants[-1].hash).hex(),
            purpose=row.purpose,
            state=_transaction_state(row, queue),
            block=inclusion.block if inclusion else 0,
            attempts=["0x" + variant.hash.hex() for variant in row.variants],
        )


def _transaction_state(row: OutboxRow, queue: "TransactionQueue") -> str:
    if row.inclusion is None:
        return "sent" if queue.is_sent(row) else "queued"
    if row.is_closed and not row.is_abandoned:
        return "final"
    return "mined" if row.inclusion.is_success else "failed"

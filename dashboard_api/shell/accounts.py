"""A job's ledger from the coordinator as the feed shows it."""

from dashboard_api.core.state import NodePay, PaymentsState, TransactionLine
from hypergpu.user.client import JobLedger

TRANSACTIONS_KEPT = 50
DECIMALS = 18


def payments_state(ledger: JobLedger) -> tuple[PaymentsState, int]:
    """Accounts of a job, and the decimals of its token."""
    block = ledger.on_chain.block if ledger.on_chain else 0
    nodes = {
        node.node_id: NodePay(
            node.receipts, node.worth or "0", node.paid or "0", node.allotted or "0"
        )
        for node in ledger.nodes
    }
    transactions = [
        TransactionLine(
            hash=each.hash,
            purpose=each.purpose,
            state=each.state,
            block=each.block,
            confirmations=max(0, block - each.block + 1) if each.block and block else 0,
        )
        for each in ledger.transactions[-TRANSACTIONS_KEPT:]
    ]
    state = PaymentsState(
        receipts=sum(each.receipts for each in nodes.values()),
        score=sum(node.total_score for node in ledger.nodes),
        worth=str(sum(int(each.worth) for each in nodes.values())),
        paid=str(sum(int(each.paid) for each in nodes.values())),
        escrow=ledger.escrow or "0",
        halted=ledger.halted,
        nodes=nodes,
        transactions=transactions,
    )
    return state, ledger.on_chain.decimals if ledger.on_chain else DECIMALS

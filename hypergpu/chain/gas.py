"""How much gas the ledger's functions take at most, by formula: nothing is estimated on the way.

Measured on the contract with cold storage on Ethereum's prices; the contract's own tests hold it to
these (``contracts/test``). A limit that is too low costs everything behind it, one that is too high
costs only where a chain charges the limit (Monad). All are upper bounds with a margin of a tenth.
"""

TRANSFER = 21_000
CLOSE = 90_000
RECORD_ONE = 160_000
OPEN_JOB = 420_000
FUND_JOB = 130_000
POST_BOND = 130_000
APPROVE = 70_000
MINT = 100_000
DEPLOY_TOKEN = 1_200_000
DEPLOY_LEDGER = 6_500_000

NODES_MAX = 250
"""In one batch, and in one payment, which the contract limits to as many."""


def aggregate(nodes: int, fresh_nodes: int) -> int:
    """Recording a batch by its sums.

    Args:
        nodes: In the batch.
        fresh_nodes: Of them, those whose first batch of the job it is.
    """
    return 120_000 + 33_000 * nodes + 19_000 * fresh_nodes


def packed(nodes: int, fresh_nodes: int, receipts: int) -> int:
    """Recording a batch with its receipts in the call data. EIP-7623 sets a floor by bytes."""
    computed = 120_000 + 33_000 * nodes + 19_000 * fresh_nodes + 480 * receipts
    return max(computed, 30_000 + 40 * (300 + 28 * nodes + 16 * receipts))


def payment(nodes: int) -> int:
    """Paying nodes whose wallets may hold nothing yet."""
    return 60_000 + 66_000 * nodes


def sweep(nodes: int) -> int:
    """Returning the dust of an epoch."""
    return 70_000 + 4_500 * nodes

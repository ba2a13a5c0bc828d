"""What was signed to settle a job, for people: each hash whole on a line of its own."""

from collections.abc import Iterator, Sequence

from hypergpu.cli.ledger.account import TransactionView

_WORDS = {
    "open": "opens the job",
    "escrow": "lets the ledger take {0} for the escrow",
    "mint": "makes play money",
    "fund": "raises the escrow",
    "batch": "records batch {0}",
    "close": "closes epoch {0}",
    "pay": "pays of epoch {0} what stake or window allows by now",
    "sweep": "gives the escrow back what epoch {0} has left over",
}


def transaction_lines(job_id: str, transactions: Sequence[TransactionView]) -> Iterator[str]:
    """Two lines for each: its hash, and what it is for and where it is.

    Args:
        job_id: Whose they are.
        transactions: In the order of their nonces.
    """
    for row in transactions:
        where = f", block {row.block}" if row.block else ""
        yield row.hash
        yield f"  {row.state}{where}: {said_of(row.purpose, job_id)}"


def said_of(purpose: str, job_id: str) -> str:
    """What a transaction is for; one of a kind that has no words is named as it is."""
    kind, *rest = purpose.split("/")
    words = _WORDS.get(kind)
    if words is None or job_id not in rest:
        return purpose
    return words.format(*rest[rest.index(job_id) + 1 :], "")

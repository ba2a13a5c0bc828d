"""What `hypergpu ledger` prints: results of acts, and a job's ledger as its coordinator has it."""

from collections import Counter
from collections.abc import Sequence
from datetime import UTC, datetime

import msgspec

from hypergpu.user.client.ledger import JobLedger, LedgerTransaction, NodeAccount
from hypergpu.user.terminal.output import (
    Column,
    amount_text,
    name_or_id,
    say,
    say_json,
    say_table,
    short_id,
)
from hypergpu.work_units import WorkUnit


class LedgerAct(
    msgspec.Struct, frozen=True, kw_only=True, tag_field="schema", tag="hypergpu/ledger-act/2"
):
    """Done by one account on one ledger."""

    account: str
    chain_id: int
    ledger: str
    blocks: list[int]
    """Blocks of the transactions that were sent, in order."""
    done: list[str]
    """Sentences for people."""
    amounts: dict[str, str]
    """By name, in the token's smallest unit."""
    again_at_unix_s: int = 0
    """Time from which running the command again does more; 0: never."""


class Claimed(
    msgspec.Struct, frozen=True, kw_only=True, tag_field="schema", tag="hypergpu/claimed/2"
):
    """Claims of one node, one for each of its jobs."""

    acts: list[LedgerAct]


def say_act(act: LedgerAct, *, as_json: bool) -> None:
    """Print a result."""
    if as_json:
        say_json(act)
        return
    for sentence in act.done:
        say(sentence)
    if act.again_at_unix_s:
        say(f"run this again from {time_text(act.again_at_unix_s)} on")


def time_text(unix_s: int) -> str:
    """A time for people."""
    return datetime.fromtimestamp(unix_s, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


NEWEST_TRANSACTIONS = 8


_OPTIONAL_PLACES = range(1, 3)
"""Places of the figures that a narrow terminal has no room for."""


def say_ledger(found: JobLedger, most: int | None) -> None:
    """Print a job's ledger.

    Args:
        found: The coordinator's answer.
        most: How many of the newest transactions to print; None: all.
    """
    decimals = found.on_chain.decimals if found.on_chain else 0
    say(f"job      {found.job}{' (over)' if found.is_over else f', epoch {found.open_epoch}'}")
    price, escrow = (amount_text(int(each), decimals) for each in (found.unit_price, found.escrow))
    unit = found.unit or WorkUnit.SAMPLES.value
    quality = " of full quality" if unit == WorkUnit.SAMPLES.value else ""
    say(f"price    {price} for 100 {unit}{quality}; escrow {escrow}")
    say(f"ledger   {_ledger_text(found)}")
    for title, text in (("halted", found.halted), ("waits", found.unfunded)):
        if text:
            say(f"{title:<8} {text}")
    say()
    figures = ("receipts", unit, "score", "worth", "allotted", "paid")
    columns = (
        *(Column("name"), Column("node")),
        *(
            Column(title, is_number=True, is_optional=place in _OPTIONAL_PLACES)
            for place, title in enumerate(figures)
        ),
        Column("epochs", folds=True),
    )
    say_table(columns, [_node_row(node, decimals) for node in found.nodes], empty="no receipts yet")
    if found.transactions:
        say()
        _say_transactions(found.transactions, most)


def _say_transactions(transactions: Sequence[LedgerTransaction], most: int | None) -> None:
    shown_transactions = transactions[-most:] if most else transactions
    titles = ("purpose", "state", "block", "transaction")
    columns = [Column(title, is_number=title == "block") for title in titles]
    rows = [
        [each.purpose, each.state, str(each.block or ""), each.hash] for each in shown_transactions
    ]
    say_table(columns, rows, empty="")
    if hidden_count := len(transactions) - len(shown_transactions):
        say(f"{hidden_count} older transactions: --all")


def _ledger_text(found: JobLedger) -> str:
    domain, chain = found.terms.domain, found.on_chain
    if not domain.chain_id:
        return "none: receipts are signed for no chain"
    where = f"{domain.contract} on chain {domain.chain_id}"
    if chain is None:
        return f"{where}, not read yet"
    block_text = f"(block {chain.block} of {chain.url})"
    if not chain.is_open:
        return f"{where}: not opened yet {block_text}"
    free = amount_text(int(chain.free_escrow), chain.decimals)
    ends = f", ends {time_text(chain.ends_at_unix_s)}" if chain.ends_at_unix_s else ""
    return f"{where}: {free} free{ends} {block_text}"


def _node_row(node: NodeAccount, decimals: int) -> list[str]:
    amounts = [
        amount_text(int(each), decimals) if each else ""
        for each in (node.worth, node.allotted, node.paid)
    ]
    states = Counter(share.state for share in node.shares)
    epochs = ", ".join(f"{count} {state}" for state, count in states.items())
    figures = [str(node.receipts), str(node.samples), str(node.total_score)]
    return [name_or_id(node.name, node.node_id), short_id(node.node_id), *figures, *amounts, epochs]

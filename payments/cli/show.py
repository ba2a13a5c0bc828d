"""The ledger of a job as its coordinator tells it: tables, and JSON with the wire's field names."""

from collections import Counter
from typing import Any

import msgspec
from google.protobuf.json_format import MessageToDict

from hypergpu.terminal.figures import name_or_id, short_id
from hypergpu.terminal.output import Column, say, say_table
from hypergpu.v1 import payments_pb2 as pb
from hypergpu.wire.statements import terms_value
from payments.cli.outcome import amount_text, time_text

NEWEST_TRANSACTIONS = 8


class ShownLedger(
    msgspec.Struct, frozen=True, kw_only=True, tag_field="schema", tag="hypergpu/ledger/2"
):
    """Pay of one job: the terms in text, and all else as payments.proto has it."""

    job: str
    key: str
    chain_id: int
    contract: str
    coordinator: str
    ledger: dict[str, Any]


_OPTIONAL = frozenset({"samples", "score"})
"""Figures that a narrow terminal has no room for."""


def shown_ledger(job: str, found: pb.GetLedgerResponse) -> ShownLedger:
    """The coordinator's answer for programs."""
    terms = terms_value(found.terms)
    fields = MessageToDict(
        found, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
    )
    fields.pop("terms", None)
    return ShownLedger(
        job=job,
        key=terms.job,
        chain_id=terms.domain.chain_id,
        contract=terms.domain.contract,
        coordinator=terms.coordinator,
        ledger=fields,
    )


def say_ledger(job: str, found: pb.GetLedgerResponse, most: int | None) -> None:
    """Print a job's ledger.

    Args:
        job: The job's id.
        found: The coordinator's answer.
        most: How many of the newest transactions to print; None: all.
    """
    decimals = found.on_chain.decimals
    say(f"job      {job}{' (over)' if found.is_over else f', epoch {found.open_epoch}'}")
    price, escrow = (amount_text(int(each), decimals) for each in (found.unit_price, found.escrow))
    say(f"price    {price} for 100 samples of full quality; escrow {escrow}")
    say(f"ledger   {_ledger_text(found)}")
    for title, text in (("halted", found.halted), ("waits", found.unfunded)):
        if text:
            say(f"{title:<8} {text}")
    say()
    figures = ("receipts", "samples", "score", "worth", "allotted", "paid")
    columns = (
        *(Column("name"), Column("node")),
        *(Column(title, is_number=True, is_optional=title in _OPTIONAL) for title in figures),
        Column("epochs", folds=True),
    )
    say_table(columns, [_node_row(node, decimals) for node in found.nodes], empty="no receipts yet")
    if found.transactions:
        say()
        _say_transactions(list(found.transactions), most)


def _say_transactions(transactions: list[pb.LedgerTransaction], most: int | None) -> None:
    shown = transactions[-most:] if most else transactions
    titles = ("purpose", "state", "block", "transaction")
    columns = [Column(title, is_number=title == "block") for title in titles]
    rows = [[each.purpose, each.state, str(each.block or ""), each.hash] for each in shown]
    say_table(columns, rows, empty="")
    if hidden := len(transactions) - len(shown):
        say(f"{hidden} older transactions: --all")


def _ledger_text(found: pb.GetLedgerResponse) -> str:
    domain = terms_value(found.terms).domain
    if not domain.chain_id:
        return "none: receipts are signed for no chain"
    where = f"{domain.contract} on chain {domain.chain_id}"
    if not found.HasField("on_chain"):
        return f"{where}, not read yet"
    chain = found.on_chain
    seen = f"(block {chain.block} of {chain.url})"
    if not chain.is_open:
        return f"{where}: not opened yet {seen}"
    free = amount_text(int(chain.free_escrow), chain.decimals)
    ends = f", ends {time_text(chain.ends_at_unix_s)}" if chain.ends_at_unix_s else ""
    return f"{where}: {free} free{ends} {seen}"


def _node_row(node: pb.LedgerNode, decimals: int) -> list[str]:
    amounts = [
        amount_text(int(each), decimals) if each else ""
        for each in (node.worth, node.allotted, node.paid)
    ]
    states = Counter(share.state for share in node.shares)
    epochs = ", ".join(f"{count} {state}" for state, count in states.items())
    figures = [str(node.receipts), str(node.samples), str(node.total_score)]
    return [name_or_id(node.name, node.node_id), short_id(node.node_id), *figures, *amounts, epochs]

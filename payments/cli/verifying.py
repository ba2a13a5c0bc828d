"""`ledger verify`: a job's receipts and records, fetched and checked."""

from pathlib import Path
from typing import NamedTuple

import msgspec

from hypergpu.errors import HyperGPUError, Reason
from hypergpu.terminal.output import Column, say, say_json, say_table
from payments.cli.outcome import amount_text
from payments.cli.service import Where, open_payments_client, run
from payments.core.receipts import FILE_BYTES_MAX, ReceiptFile, decode_file
from payments.core.verify import NodeFinding, Verification, verify


class VerifyOrder(NamedTuple):
    """What to check."""

    job: str | None
    file: Path | None
    """Receipts; None: the coordinator is asked."""
    chain_url: str
    is_offline: bool


class Verified(
    msgspec.Struct, frozen=True, kw_only=True, tag_field="schema", tag="hypergpu/verified/2"
):
    """Result of a check."""

    job: str
    chain_id: int
    ledger: str
    block: int | None
    """None: no chain was asked."""
    is_sound: bool
    faults: list[str]
    open: list[str]
    nodes: list[NodeFinding]
    decimals: int


def verify_job(order: VerifyOrder, where: Where, *, as_json: bool) -> None:
    """Check a job and print the result."""
    found = run(lambda: _verified(order, where))
    if as_json:
        say_json(found)
    else:
        _say(found)
    if not found.is_sound:
        detail = f"{found.job}: {len(found.faults)} faults in its receipts or its pay"
        fix = "show them to its nodes; arbiters void what was paid wrongly: hypergpu ledger void"
        raise HyperGPUError(Reason.SIGNATURE_INVALID, detail, fix=fix)


def read_receipt_file(path: Path) -> ReceiptFile:
    """Read a file that `ledger export` wrote."""
    try:
        with path.open("rb") as opened:
            content = opened.read(FILE_BYTES_MAX + 1)
    except OSError as broken:
        detail = f"{path} cannot be read: {broken.strerror}"
        raise HyperGPUError(Reason.FILE_UNUSABLE, detail) from broken
    return decode_file(content, source=str(path))


async def _verified(order: VerifyOrder, where: Where) -> Verified:
    chain_url = order.chain_url
    if order.file is not None:
        receipts = read_receipt_file(order.file)
    else:
        async with open_payments_client(where, order.job) as payments:
            receipts = await payments.receipt_file()
            chain_url = chain_url or (await payments.ledger()).on_chain.url
    domain = receipts.terms.domain
    if order.is_offline or not domain.chain_id:
        return _result(receipts, verify(receipts), decimals=0)
    from payments.cli.account import open_ledger
    from payments.cli.records import read_records

    async with open_ledger(domain, chain_url) as ledger:
        records = await read_records(ledger, receipts.terms)
        return _result(receipts, verify(receipts, records), decimals=ledger.decimals)


def _result(receipts: ReceiptFile, found: Verification, *, decimals: int) -> Verified:
    domain = receipts.terms.domain
    return Verified(
        job=found.job_id,
        chain_id=domain.chain_id,
        ledger=domain.contract,
        block=found.block,
        is_sound=not found.faults,
        faults=list(found.faults),
        open=list(found.open),
        nodes=list(found.nodes),
        decimals=decimals,
    )


def _say(found: Verified) -> None:
    columns = (
        Column("node"),
        Column("receipts", is_number=True),
        Column("score", is_number=True),
        Column("worth", is_number=True),
        Column("recorded", is_number=True),
        Column("allotted", is_number=True),
        Column("paid", is_number=True),
        Column("void", is_number=True),
    )
    rows = [
        [
            *(node.node, str(node.receipts), str(node.total_score)),
            amount_text(node.worth, found.decimals),
            str(node.recorded_score),
            *(amount_text(each, found.decimals) for each in (node.allotted, node.paid, node.void)),
        ]
        for node in found.nodes
    ]
    say_table(columns, rows, empty=f"{found.job} has no receipts")
    for title, texts in (("fault", found.faults), ("open", found.open)):
        for text in texts:
            say(f"{title}: {text}")
    against = "no chain was asked"
    if found.block is not None:
        against = f"compared with {found.ledger} on chain {found.chain_id} at block {found.block}"
    receipts = sum(node.receipts for node in found.nodes)
    verdict = "sound" if found.is_sound else f"{len(found.faults)} faults"
    say(f"{found.job}: {receipts} receipts, {verdict}; {against}")

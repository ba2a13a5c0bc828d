"""`ledger verify`: a job's receipts and records, fetched and checked."""

from functools import partial

import msgspec

from hypergpu.errors import HyperGPUError, Reason
from hypergpu.terminal.output import Column, say, say_json, say_table
from payments.cli.outcome import amount_text
from payments.cli.service import JobAt, open_payments_client, run
from payments.core.receipt_file import ReceiptFile
from payments.core.verify import NodeFinding, Verification, verify


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


def verify_job(at: JobAt, chain_url: str, *, is_offline: bool, as_json: bool) -> None:
    """Check a job and print the result; a fault is an error."""
    found = run(lambda: _check_job(at, chain_url, is_offline=is_offline))
    if as_json:
        say_json(found)
    else:
        _say(found)
    if not found.is_sound:
        detail = f"{found.job}: {len(found.faults)} faults in its receipts or its pay"
        fix = "show them to its nodes; arbiters void what was paid wrongly: hypergpu ledger void"
        raise HyperGPUError(Reason.SIGNATURE_INVALID, detail, fix=fix)


async def _check_job(at: JobAt, chain_url: str, *, is_offline: bool) -> Verified:
    receipts = await at.receipts()
    domain = receipts.terms.domain
    if is_offline or not domain.chain_id:
        return _result(receipts, verify(receipts), decimals=0)
    # Receipts alone are checked without the extra [chain].
    from payments.cli.account import open_ledger
    from payments.cli.records import read_records

    if at.file is None and not chain_url:
        async with open_payments_client(at) as payments:
            chain_url = (await payments.ledger()).on_chain.url
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
    figures = ("receipts", "score", "worth", "recorded", "allotted", "paid", "void")
    columns = (Column("node"), *(Column(title, is_number=True) for title in figures))
    shown = partial(amount_text, decimals=found.decimals)
    rows = [
        [
            *(node.node, str(node.receipts), str(node.total_score), shown(node.worth)),
            *(str(node.recorded_score), *map(shown, (node.allotted, node.paid, node.void))),
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

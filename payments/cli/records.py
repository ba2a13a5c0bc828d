"""Everything that a ledger holds about one job, from its events, calls and views."""

from collections.abc import AsyncIterator
from typing import Any

from hypergpu.errors import HyperGPUError, Reason
from hypergpu.ids import NodeId
from hypergpu.keys.keccak import keccak
from hypergpu.statements.domain import Terms, word_bytes
from hypergpu.units import Wei
from payments.cli.account import OpenLedger
from payments.core.calls import (
    AccountView,
    EpochView,
    JobOnLedger,
    ShareState,
    ShareView,
    TotalsEntry,
)
from payments.core.verify import BatchRecord, LedgerRecords, SingleRecord
from payments.shell.chain_errors import CallRefusedError
from payments.shell.contracts import ledger_contract

_TERMS = "(address,bytes32,bytes32,uint128,uint32)"
_OPENED = keccak(f"JobOpened(bytes32,address,address,bytes32,{_TERMS},uint256)".encode())
_BATCH = keccak(b"BatchRecorded(bytes32,uint32,uint32,bytes32)")
_SINGLE = keccak(b"ContributionRecorded(bytes32,address,uint32,uint64,uint64,uint256)")
_SPAN_MOST = 10_000
"""Blocks of one request: what public RPCs commonly allow."""
_WORD = 32


async def read_records(ledger: OpenLedger, terms: Terms) -> LedgerRecords:
    """Read a job's records at the ledger's block."""
    job = word_bytes(terms.job)
    (found,) = await ledger.read_all([("getJob", (job,))])
    if found is None:
        raise HyperGPUError(
            Reason.JOB_UNKNOWN,
            f"the job is not on the ledger {ledger.domain.contract}",
            fix="its coordinator opens it when it has the escrow: hypergpu ledger show JOB",
        )
    logs = [each async for each in _logs_from_opening(ledger, job)]
    records = [await _record(ledger, each) for each in logs]
    nodes = sorted({entry.node for each in records for entry in _entries(each)})
    epochs = sorted({each.epoch for each in records})
    view = JobOnLedger(
        time_s=ledger.block.time_s,
        window_s=await ledger.read("CHALLENGE_WINDOW"),
        balance=Wei(0),
        is_open=True,
        unit_price=Wei(found["terms"]["unitPrice"]),
        free=Wei(found["free"]),
        next_sequence=found["nextSeq"],
        ends_at_s=found["endsAt"],
        accounts=await _accounts(ledger, job, nodes),
        epochs={epoch: await _epoch(ledger, job, epoch, nodes) for epoch in epochs},
    )
    return LedgerRecords(ledger.block.number, view, records)


async def _logs_from_opening(ledger: OpenLedger, job: bytes) -> AsyncIterator[dict[str, Any]]:
    """The job's records in the chain's order: searched backwards to the job's opening."""
    names = ["0x" + each.hex() for each in (_OPENED, _BATCH, _SINGLE)]
    last, span = ledger.block.number, _SPAN_MOST
    found: list[list[dict[str, Any]]] = []
    is_opened = False
    while last >= 0 and not is_opened:
        first = max(0, last - span + 1)
        wanted = {
            "address": ledger.domain.contract,
            "fromBlock": hex(first),
            "toBlock": hex(last),
            "topics": [names, "0x" + job.hex()],
        }
        try:
            logs = await ledger.chain.ask("eth_getLogs", wanted)
        except CallRefusedError:
            if span == 1:
                raise
            span = max(1, span // 4)
            continue
        is_opened = any(each["topics"][0] == names[0] for each in logs)
        found.append([each for each in logs if each["topics"][0] != names[0]])
        last = first - 1
    for logs in reversed(found):
        for each in logs:
            yield each


async def _record(ledger: OpenLedger, log: dict[str, Any]) -> BatchRecord | SingleRecord:
    """A record from its event; the entries of a batch are in its call."""
    topics = [bytes.fromhex(each[2:]) for each in log["topics"]]
    content = bytes.fromhex(log["data"][2:])
    words = [
        int.from_bytes(content[at : at + _WORD], "big") for at in range(0, len(content), _WORD)
    ]
    if topics[0] == _SINGLE:
        node = NodeId("0x" + topics[2][-20:].hex())
        return SingleRecord(
            int.from_bytes(topics[3], "big"), TotalsEntry(node, words[0] + 1, words[1])
        )
    sent = await ledger.chain.ask("eth_getTransactionByHash", log["transactionHash"])
    call = bytes.fromhex(sent["input"][2:])
    *_, entries = ledger_contract().decode_call("submitAggregate", call)
    return BatchRecord(
        int.from_bytes(topics[2], "big"),
        words[0],
        content[_WORD : 2 * _WORD],
        tuple(TotalsEntry.from_word(word) for word in entries),
    )


def _entries(record: BatchRecord | SingleRecord) -> tuple[TotalsEntry, ...]:
    return record.entries if isinstance(record, BatchRecord) else (record.entry,)


async def _accounts(
    ledger: OpenLedger, job: bytes, nodes: list[NodeId]
) -> dict[NodeId, AccountView]:
    found = await ledger.read_all([("getAccount", (job, node)) for node in nodes])
    return {
        node: AccountView(each["counted"], each["score"], Wei(each["earned"]))
        for node, each in zip(nodes, found, strict=True)
    }


async def _epoch(ledger: OpenLedger, job: bytes, epoch: int, nodes: list[NodeId]) -> EpochView:
    head = await ledger.read("getEpoch", job, epoch)
    shares = await ledger.read_all([("getContribution", (job, epoch, node)) for node in nodes])
    return EpochView(
        head["openedAt"],
        head["closedAt"],
        {
            node: ShareView(ShareState(share["state"]), Wei(share["amount"]))
            for node, share in zip(nodes, shares, strict=True)
            if share["state"] != ShareState.NONE.value
        },
    )

"""Records of an account on a ledger, found by their topics a span of blocks at a time."""

from typing import Any

from eth_utils.address import to_checksum_address
from web3.exceptions import Web3RPCError

from hypergpu.errors import HyperGPUError, Reason
from hypergpu.ids import NodeId
from hypergpu.ledger_terms import Terms, word_bytes
from payments.cli.account import OpenLedger
from payments.core.transactions import TotalsEntry
from payments.core.verify import BatchRecord, LedgerRecords, SingleRecord
from payments.shell.ethereum import ledger_contract
from payments.shell.ledger_reader import JobReader, job_on_ledger

_SPAN_MOST = 10_000
"""Blocks of one request: what public RPCs commonly allow."""


async def read_records(ledger: OpenLedger, terms: Terms) -> LedgerRecords:
    """Read a job's records at the ledger's block."""
    ledger_job = await ledger.read_or_none("getJob", word_bytes(terms.job))
    if ledger_job is None:
        raise HyperGPUError(
            Reason.JOB_UNKNOWN,
            f"the job is not on the ledger {ledger.domain.contract}",
            fix="its coordinator opens it when it has the escrow: hypergpu ledger show JOB",
        )
    with ledger.chain.guard():
        records = await _RecordSearch(ledger, terms).records()
    nodes = sorted({entry.node for each in records for entry in each.entries})
    epochs = sorted({each.epoch for each in records})
    reader = JobReader(ledger.chain, ledger.domain.contract, terms.job, ledger.block)
    window_s = await ledger.read("CHALLENGE_WINDOW")
    view = job_on_ledger(ledger_job, ledger.block, window_s)._replace(
        accounts=await reader.accounts(nodes), epochs=await reader.epochs(epochs, nodes)
    )
    return LedgerRecords(ledger.block.number, view, records)


class _RecordSearch:
    """Finds a job's events, and the calls that they are of."""

    def __init__(self, ledger: OpenLedger, terms: Terms) -> None:
        self._block = ledger.block.number
        self._eth = ledger.chain.web3.eth
        address = to_checksum_address(ledger.domain.contract)
        self._contract = self._eth.contract(address=address, abi=ledger_contract().abi)
        events = self._contract.events
        self._opened, self._batch = events.JobOpened(), events.BatchRecorded()
        self._single = events.ContributionRecorded()
        topics = [each.topic for each in (self._opened, self._batch, self._single)]
        self._filter = {"address": address, "topics": [topics, "0x" + terms.job]}

    async def records(self) -> list[BatchRecord | SingleRecord]:
        """The job's records in the chain's order: searched backwards to the job's opening."""
        last, span = self._block, _SPAN_MOST
        logs: list[Any] = []
        while last >= 0 and not (logs and _topic(logs[0]) == self._opened.topic):
            first = max(0, last - span + 1)
            log_filter: Any = {**self._filter, "fromBlock": first, "toBlock": last}
            try:
                logs[:0] = await self._eth.get_logs(log_filter)
            except Web3RPCError:
                if span == 1:
                    raise
                span = max(1, span // 4)
                continue
            last = first - 1
        return [await self._record(each) for each in logs if _topic(each) != self._opened.topic]

    async def _record(self, log: Any) -> BatchRecord | SingleRecord:
        """A record from its event; the entries of a batch are in its call."""
        if _topic(log) == self._single.topic:
            single = self._single.process_log(log)["args"]
            node = NodeId(single["node"].lower())
            entry = TotalsEntry(node, single["sequence"] + 1, single["totalScore"])
            return SingleRecord(single["epoch"], entry)
        batch = self._batch.process_log(log)["args"]
        transaction = await self._eth.get_transaction(log["transactionHash"])
        _, call = self._contract.decode_function_input(transaction["input"])
        entries = tuple(TotalsEntry.from_word(word) for word in call["entries"])
        return BatchRecord(batch["epoch"], batch["seq"], batch["root"], entries)


def _topic(log: Any) -> str:
    return "0x" + bytes(log["topics"][0]).hex()

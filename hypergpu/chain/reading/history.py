"""A job's whole history off a chain, as plain data that an audit recomputes.

Everything is read from the contract's events, the transactions behind them, and its answers at one
block. The coordinator is not asked.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from eth_abi.abi import decode
from eth_abi.exceptions import DecodingError

from hypergpu.chain.ledger import JobOnChain
from hypergpu.chain.moments import moment
from hypergpu.chain.reading.ledger import LedgerReader
from hypergpu.chain.rpc.answers import HASH_BYTES, Block, Event, octets, quantity
from hypergpu.chain.rpc.chain import EvmChain, is_of_contract
from hypergpu.chain.rpc.client import Call
from hypergpu.chain.rpc.errors import RpcGarbledError, RpcRefusedError
from hypergpu.chain.rpc.logs import logs
from hypergpu.errors import HyperGPUError, Reason
from hypergpu.ids import JobKey, NodeId
from hypergpu.keys.keccak import keccak
from hypergpu.ledger.audit.facts import (
    BatchFact,
    EpochFact,
    ForcedFact,
    Form,
    JobFact,
)
from hypergpu.ledger.packing import NodeTotals, totals_words
from hypergpu.ledger.typed import Domain, address_bytes, word_bytes
from hypergpu.units import Samples, Wei

_PACKED = "(bytes32,uint32,uint32,bytes32,bytes)"
_AGGREGATE = "(bytes32,uint32,uint32,bytes32,(address,uint48,uint32,uint64,uint80)[])"
_OFFSET = (32).to_bytes(32, "big")
_FORMS = {
    keccak(f"submitContributions{_PACKED}".encode())[:4]: (Form.PACKED, _PACKED),
    keccak(f"submitAggregate{_AGGREGATE}".encode())[:4]: (Form.AGGREGATE, _AGGREGATE),
}


_OPENED = "JobOpened"
Report = Callable[[int, int], object]
"""Takes how many blocks have been read, and how many will be."""


class _Told(NamedTuple):
    """One event of the job."""

    name: str
    values: dict[str, Any]
    transaction: bytes
    block: int


class JobReader:
    """Reads one job. Every method raises `RpcError` when there is no answer to believe."""

    def __init__(
        self,
        chain: EvmChain,
        domain: Domain,
        job: JobKey,
        report: Report = lambda _read, _all: None,
    ) -> None:
        """Ask nothing yet.

        Args:
            chain: The ledger's.
            domain: The ledger's.
            job: Which one.
            report: Is told, from time to time, how far the reading of events is.
        """
        self._chain = chain
        self._domain = domain
        self._ledger = LedgerReader(chain, address_bytes(domain.contract))
        self._job_key = job
        self._report = report
        self._told: list[_Told] = []
        self._blocks = range(0)
        """Whose events have been read."""

    def fact(self, at: Block | None = None) -> JobFact:
        """What the chain says of the job, at its newest block or another.

        The events of each block are read once, from the job's opening on: a job's age in blocks
        makes the cost, and the chain's height does not.

        Args:
            at: The block; None: the newest.

        Raises:
            HyperGPUError: JOB_UNKNOWN, the ledger does not know the job.
            RpcError: the chain cannot be asked, or its answers cannot be believed.
        """
        head = at or self._chain.head()
        opened_at_s = self._job(head).opened_at_s
        if not self._blocks:
            first = self._before(opened_at_s, head)
            self._blocks = range(first, first)
        self._read(head)
        if at is None:
            # Reading takes its time, after which an RPC may have forgotten how an old block was.
            head = max(head, self._chain.head(), key=lambda block: block.number)
            self._read(head)
        told = [one for one in self._told if one.block <= head.number]
        if all(one.name != _OPENED for one in told):
            raise RpcGarbledError(
                f"the RPC at {self._chain.where} has no block with the opening of the job"
                f" {self._job_key}, which its ledger says was at {moment(opened_at_s)}"
            )
        return self._fact(told, head)

    def _fact(self, told: Sequence[_Told], head: Block) -> JobFact:
        batches, forced = self._batches(told), _forced(told)
        numbers = sorted(
            {one.epoch for one in batches}
            | {one.epoch for one in forced}
            | {one.values["epoch"] for one in told if one.name == "EpochClosed"}
        )
        nodes = sorted(
            {node for batch in batches for node, _, _ in batch.parts()}
            | {NodeId(one.values["node"]) for one in told if "node" in one.values}
        )
        ledger, key = self._ledger, self._job_key
        job, (digest,) = self._job(head), ledger.asked(head, "digestOf", word_bytes(key))
        window_s, unbonding_s = ledger.waits_s(head)
        return JobFact(
            job=key,
            domain=self._domain,
            coordinator=job.coordinator,
            unit_price=Wei(job.unit_price),
            deposited=Wei(sum(_values(told, "JobFunded", "amount"))),
            free=Wei(job.free),
            reclaimed=Wei(sum(_values(told, "JobReclaimed", "amount"))),
            digest=digest,
            block=head.number,
            block_hash=head.hash.hex(),
            time_s=head.time_s,
            window_s=window_s,
            unbonding_s=unbonding_s,
            ends_at_s=job.ends_at_s,
            recorded_at_s=self._recorded_at_s(told, job.opened_at_s),
            batches=batches,
            forced=forced,
            epochs=self._epochs(numbers, head, self._closers(told)),
            shares=ledger.share_facts(
                key, [(number, node) for number in numbers for node in nodes], head
            ),
            accounts=ledger.account_facts(key, nodes, head),
        )

    def _before(self, opened_at_s: int, head: Block) -> int:
        """A block before the one that opened the job, by one range of logs at most.

        No block is older than the one before it. Blocks that an RPC has forgotten count as older.
        """
        width = self._chain.rpc.pace.log_blocks_max
        later, first = head.number + 1, max(0, head.number + 1 - width)
        while first and self._time_s(first) >= opened_at_s:
            later, first = first, max(0, first - 2 * (later - first))
        starts = range(first, later, width)
        return starts[bisect_left(starts, opened_at_s, lo=1, key=self._time_s) - 1]

    def _recorded_at_s(self, told: Sequence[_Told], opened_at_s: int) -> int:
        """When the newest batch came, or the job was opened; 0: the batch's block is forgotten."""
        number = max((one.block for one in told if one.name == "BatchSubmitted"), default=None)
        return opened_at_s if number is None else self._time_s(number)

    def _time_s(self, number: int) -> int:
        (block,) = self._chain.blocks([number])
        return 0 if block is None else block.time_s

    def _read(self, head: Block) -> None:
        """Go on to a block with the job's events."""
        first, after = self._blocks.start, head.number + 1
        wanted = {"address": self._domain.contract, "topics": [None, f"0x{self._job_key}"]}
        for part in logs(self._chain.rpc, wanted, range(self._blocks.stop, after)):
            self._told += [told for entry in part.entries for told in self._events(entry)]
            self._blocks = range(first, part.next_block)
            self._report(part.next_block - first, after - first)

    def _events(self, entry: Any) -> Iterator[_Told]:
        try:
            topics = tuple(octets(topic, HASH_BYTES) for topic in entry["topics"])
            event = Event(octets(entry["address"]), topics, octets(entry["data"]))
            transaction = octets(entry["transactionHash"], HASH_BYTES)
            block = quantity(entry["blockNumber"])
        except (KeyError, TypeError) as broken:
            raise RpcGarbledError("the chain's RPC gave a log without its parts") from broken
        found = self._ledger.calls.abi.event(event)
        if found is not None:
            yield _Told(*found, transaction, block)

    def _batches(self, told: Sequence[_Told]) -> tuple[BatchFact, ...]:
        submitted = [one for one in told if one.name == "BatchSubmitted"]
        asked = [_transaction(one) for one in submitted]
        skipped: dict[int, list[NodeId]] = {}
        for one in told:
            if one.name == "NodeSkipped":
                skipped.setdefault(one.values["seq"], []).append(NodeId(one.values["node"]))
        return tuple(
            _batch(one, answer, tuple(skipped.get(one.values["seq"], ())))
            for one, answer in zip(submitted, self._answers(asked), strict=True)
        )

    def _closers(self, told: Sequence[_Told]) -> dict[int, str]:
        """Whose transaction closed each epoch; none where the RPC does not say it."""
        closed = [one for one in told if one.name == "EpochClosed"]
        answers = self._answers([_transaction(one) for one in closed])
        return {
            one.values["epoch"]: str(answer.get("from", "")).lower()
            for one, answer in zip(closed, answers, strict=True)
            if isinstance(answer, dict)
        }

    def _job(self, at: Block) -> JobOnChain:
        try:
            return self._ledger.job(self._job_key, at)
        except RpcRefusedError as refused:
            if not is_of_contract(refused):
                raise
            where = f"the ledger {self._domain.contract} on {self._chain.where}"
            raise HyperGPUError(
                Reason.JOB_UNKNOWN, f"{where} does not know the job {self._job_key}: {refused}"
            ) from refused

    def _epochs(
        self, numbers: Sequence[int], at: Block, closers: Mapping[int, str]
    ) -> tuple[EpochFact, ...]:
        found = self._ledger.epochs(self._job_key, numbers, at)
        return tuple(
            EpochFact(
                number=number,
                total_score=epoch.total_score,
                pool=Wei(epoch.pool),
                is_swept=epoch.is_swept,
                opened_at_s=epoch.opened_at_s,
                closed_at_s=epoch.closed_at_s,
                closed_by=closers.get(number, ""),
            )
            for number, epoch in zip(numbers, found, strict=True)
            if epoch.closed_at_s
        )

    def _answers(self, calls: Sequence[Call]) -> list[object]:
        answers = self._chain.rpc.batch(calls)
        for answer in answers:
            if isinstance(answer, RpcRefusedError):
                raise answer
        return answers


def _transaction(told: _Told) -> Call:
    """Asks for the transaction that an event came of."""
    return Call("eth_getTransactionByHash", (f"0x{told.transaction.hex()}",))


def _batch(told: _Told, transaction: object, skipped: tuple[NodeId, ...]) -> BatchFact:
    """A batch with what its transaction held; without content where that is no call of ours."""
    values, form, content = told.values, Form.AGGREGATE, b""
    if isinstance(transaction, dict):
        form, content = _content(octets(transaction.get("input")))
    return BatchFact(
        seq=values["seq"],
        epoch=values["epoch"],
        root=values["root"],
        digest=values["digest"],
        form=form,
        content=content,
        skipped=skipped,
        block=told.block,
    )


def _content(call: bytes) -> tuple[Form, bytes]:
    if call[:4] not in _FORMS:
        return Form.AGGREGATE, b""
    form, types = _FORMS[call[:4]]
    try:
        # Arguments lie as one struct of dynamic size does, behind the offset of its beginning.
        ((*_, body),) = decode([types], _OFFSET + call[4:])
    except DecodingError as broken:
        raise RpcGarbledError(f"a batch's call data cannot be read: {broken}") from None
    if form is Form.PACKED:
        return form, bytes(body)
    totals = (
        NodeTotals(NodeId(node), first, receipts, Samples(samples), score)
        for node, first, receipts, samples, score in body
    )
    return form, totals_words(totals)


def _forced(told: Sequence[_Told]) -> tuple[ForcedFact, ...]:
    return tuple(
        ForcedFact(
            NodeId(one.values["node"]), one.values["sequence"], one.values["epoch"], one.block
        )
        for one in told
        if one.name == "ContributionForced"
    )


def _values(told: Sequence[_Told], name: str, field: str) -> list[int]:
    return [int(one.values[field]) for one in told if one.name == name]

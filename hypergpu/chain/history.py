"""A job's whole history off a chain, as plain data that an audit recomputes.

Everything is read from the contract's events, the transactions behind them, and its answers at one
block. The coordinator is not asked.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from eth_abi.abi import decode
from eth_abi.exceptions import DecodingError

from hypergpu.chain.abi import Abi
from hypergpu.chain.artifacts import artifact
from hypergpu.chain.ledger import CONTRACT
from hypergpu.chain.rpc.answers import HASH_BYTES, Block, Event, octets
from hypergpu.chain.rpc.chain import EvmChain
from hypergpu.chain.rpc.client import Call
from hypergpu.chain.rpc.errors import RpcGarbledError, RpcRefusedError
from hypergpu.ids import Address, JobKey, NodeId
from hypergpu.keys.keccak import keccak
from hypergpu.ledger.audit.facts import (
    AccountFact,
    BatchFact,
    EpochFact,
    ForcedFact,
    Form,
    JobFact,
    ShareFact,
)
from hypergpu.ledger.packing import NodeTotals, totals_words
from hypergpu.ledger.settlement.state import ShareState
from hypergpu.ledger.typed import Domain, address_bytes, word_bytes
from hypergpu.refusal import Reason, RefusalError
from hypergpu.units import Samples, Wei

BLOCKS_AT_ONCE = 100
"""Public RPCs give the logs of no more blocks in one answer."""
_PACKED = "(bytes32,uint32,uint32,bytes32,bytes)"
_AGGREGATE = "(bytes32,uint32,uint32,bytes32,(address,uint48,uint32,uint64,uint80)[])"
_OFFSET = (32).to_bytes(32, "big")
_FORMS = {
    keccak(f"submitContributions{_PACKED}".encode())[:4]: (Form.PACKED, _PACKED),
    keccak(f"submitAggregate{_AGGREGATE}".encode())[:4]: (Form.AGGREGATE, _AGGREGATE),
}


class _Told(NamedTuple):
    """One event of the job."""

    name: str
    values: dict[str, Any]
    transaction: bytes


class JobReader:
    """Reads one ledger. Every method raises `RpcError` when there is no answer to believe."""

    def __init__(self, chain: EvmChain, domain: Domain) -> None:
        self._chain = chain
        self._domain = domain
        self._abi = Abi(artifact(CONTRACT).abi)

    def fact(self, job: JobKey, *, from_block: int = 0, at: Block | None = None) -> JobFact:
        """What the chain says of a job, at its newest block or another.

        Takes one request for each 100 blocks since ``from_block``, and a few more.

        Args:
            job: Which one.
            from_block: The ledger's or the job's first; earlier ones hold nothing of it.
            at: The block; None: the newest.

        Raises:
            RefusalError: JOB_UNKNOWN, the ledger does not know the job.
            RpcError: the chain cannot be asked, or its answers cannot be believed.
        """
        head = at or self._chain.head()
        told = list(self._events(job, from_block, head.number))
        batches, forced = self._batches(told), _forced(told)
        block = hex(head.number)
        numbers = sorted(
            {one.epoch for one in batches}
            | {one.epoch for one in forced}
            | {one.values["epoch"] for one in told if one.name == "EpochClosed"}
        )
        nodes = sorted(
            {node for batch in batches for node, _, _ in batch.parts()}
            | {NodeId(one.values["node"]) for one in told if "node" in one.values}
        )
        state, digest = self._job(job, block)
        epochs = self._epochs(job, numbers, block)
        return JobFact(
            job=job,
            domain=self._domain,
            coordinator=Address(state[1][0]),
            unit_price=Wei(state[1][4]),
            deposited=Wei(sum(_values(told, "JobFunded", "amount"))),
            free=Wei(state[2]),
            reclaimed=Wei(sum(_values(told, "JobReclaimed", "amount"))),
            digest=digest,
            block=head.number,
            block_hash=head.hash.hex(),
            time_s=head.time_s,
            window_s=self._window_s(),
            batches=batches,
            forced=forced,
            epochs=epochs,
            shares=self._shares(job, numbers, nodes, block),
            accounts=self._accounts(job, nodes, block),
        )

    def _events(self, job: JobKey, first: int, last: int) -> Iterator[_Told]:
        starts = range(first, last + 1, BLOCKS_AT_ONCE)
        asked = [
            Call(
                "eth_getLogs",
                (
                    {
                        "address": self._domain.contract,
                        "fromBlock": hex(start),
                        "toBlock": hex(min(start + BLOCKS_AT_ONCE - 1, last)),
                        "topics": [None, f"0x{job}"],
                    },
                ),
            )
            for start in starts
        ]
        for answer in self._answers(asked):
            if not isinstance(answer, list):
                raise RpcGarbledError("the chain's RPC gave no list of logs")
            for entry in answer:
                yield from self._told(entry)

    def _told(self, entry: Any) -> Iterator[_Told]:
        try:
            topics = tuple(octets(topic, HASH_BYTES) for topic in entry["topics"])
            event = Event(octets(entry["address"]), topics, octets(entry["data"]))
            transaction = octets(entry["transactionHash"], HASH_BYTES)
        except (KeyError, TypeError) as broken:
            raise RpcGarbledError("the chain's RPC gave a log without its parts") from broken
        found = self._abi.event(event)
        if found is not None:
            yield _Told(*found, transaction)

    def _batches(self, told: Sequence[_Told]) -> tuple[BatchFact, ...]:
        submitted = [one for one in told if one.name == "BatchSubmitted"]
        asked = [
            Call("eth_getTransactionByHash", (f"0x{one.transaction.hex()}",)) for one in submitted
        ]
        skipped: dict[int, list[NodeId]] = {}
        for one in told:
            if one.name == "NodeSkipped":
                skipped.setdefault(one.values["seq"], []).append(NodeId(one.values["node"]))
        return tuple(
            _batch(one.values, answer, tuple(skipped.get(one.values["seq"], ())))
            for one, answer in zip(submitted, self._answers(asked), strict=True)
        )

    def _job(self, job: JobKey, block: str) -> tuple[tuple[Any, ...], bytes]:
        try:
            state, digest = self._asked(block, ("getJob", job), ("digestOf", job))
        except RpcRefusedError as refused:
            where = f"the ledger {self._domain.contract} on {self._chain.where}"
            raise RefusalError(
                Reason.JOB_UNKNOWN, f"{where} does not know the job {job}: {refused}"
            ) from refused
        return tuple(state), digest

    def _epochs(self, job: JobKey, numbers: Sequence[int], block: str) -> tuple[EpochFact, ...]:
        answers = self._asked(block, *(("getEpoch", job, number) for number in numbers))
        return tuple(
            EpochFact(
                number=number,
                total_score=total,
                pool=Wei(pool),
                is_swept=is_swept,
                closed_at_s=closed_at_s,
            )
            for number, (total, pool, _, closed_at_s, is_swept) in zip(
                numbers, answers, strict=True
            )
            if closed_at_s
        )

    def _shares(
        self, job: JobKey, numbers: Sequence[int], nodes: Sequence[NodeId], block: str
    ) -> tuple[ShareFact, ...]:
        places = [(number, node) for number in numbers for node in nodes]
        asked = (("getContribution", job, number, node) for number, node in places)
        return tuple(
            ShareFact(
                epoch=number,
                node=node,
                state=ShareState(state),
                score=score,
                reward=Wei(reward),
                paid=Wei(paid),
            )
            for (number, node), (state, receipts, score, reward, paid) in zip(
                places, self._asked(block, *asked), strict=True
            )
            if receipts
        )

    def _accounts(
        self, job: JobKey, nodes: Sequence[NodeId], block: str
    ) -> tuple[AccountFact, ...]:
        answers = self._asked(block, *(("getAccount", job, node) for node in nodes))
        return tuple(
            AccountFact(
                node=node,
                counted=counted,
                earned=Wei(earned),
                paid=Wei(paid),
                pending=Wei(pending),
                release_at_s=release_at_s,
                voided=Wei(voided),
            )
            for node, (counted, _, earned, paid, pending, release_at_s, voided, _) in zip(
                nodes, answers, strict=True
            )
        )

    def _window_s(self) -> int:
        """The challenge window, which is fixed at deployment."""
        call = self._abi.call("CHALLENGE_WINDOW")
        answer = self._chain.read(address_bytes(self._domain.contract), call)
        return int(self._abi.answer("CHALLENGE_WINDOW", answer)[0])

    def _asked(self, block: str, *questions: tuple[Any, ...]) -> list[Any]:
        """What the ledger answers, each answer's one value."""
        calls = []
        for name, job, *rest in questions:
            body = self._abi.call(name, word_bytes(job), *rest)
            asked = {"to": self._domain.contract, "data": f"0x{body.hex()}"}
            calls.append(Call("eth_call", (asked, block)))
        return [
            self._abi.answer(question[0], octets(answer))[0]
            for question, answer in zip(questions, self._answers(calls), strict=True)
        ]

    def _answers(self, calls: Sequence[Call]) -> list[object]:
        answers = self._chain.rpc.batch(calls)
        for answer in answers:
            if isinstance(answer, RpcRefusedError):
                raise answer
        return answers


def _batch(values: dict[str, Any], transaction: object, skipped: tuple[NodeId, ...]) -> BatchFact:
    """A batch with what its transaction held; without content where that is no call of ours."""
    form, content = Form.AGGREGATE, b""
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
        ForcedFact(NodeId(one.values["node"]), one.values["sequence"], one.values["epoch"])
        for one in told
        if one.name == "ContributionForced"
    )


def _values(told: Sequence[_Told], name: str, field: str) -> list[int]:
    return [int(one.values[field]) for one in told if one.name == name]

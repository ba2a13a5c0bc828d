"""How far pay is, asked of a ledger at one block."""

from collections.abc import Mapping, Sequence

from hypergpu.chain.abi import Abi
from hypergpu.chain.artifacts import artifact
from hypergpu.chain.ledger import CONTRACT
from hypergpu.chain.rpc.chain import EvmChain
from hypergpu.chain.rpc.errors import RpcRefusedError
from hypergpu.cli.ledger.tiers.standing import (
    TIERS,
    Clock,
    PayView,
    ToldAccount,
    ToldEpoch,
    ToldShare,
    node_tiers,
)
from hypergpu.ids import JobKey, NodeId
from hypergpu.ledger.settlement.state import ShareState
from hypergpu.ledger.typed import Domain, address_bytes, word_bytes

SHARES_MOST = 2_000
"""That are asked for at once; public RPCs bear no more."""


class PayReader:
    """Asks one ledger. Every method raises `RpcError` when there is no answer to believe."""

    def __init__(self, chain: EvmChain, ledger: Domain) -> None:
        self._chain = chain
        self._ledger = ledger
        self._abi = Abi(artifact(CONTRACT).abi)

    def pay(
        self, job: JobKey, vouched: Mapping[NodeId, int], epochs: Sequence[int]
    ) -> PayView | None:
        """How far the pay of a job's nodes is, at the newest block.

        None: the ledger does not know the job.

        Args:
            job: Which one.
            vouched: What each node's newest voucher says.
            epochs: That may have been recorded in, ascending.
        """
        head = self._chain.head()
        try:
            price = self._unit_price(job, head.hash)
        except RpcRefusedError as refused:
            # Without the contract's own words it was the RPC that refused.
            if not refused.words:
                raise
            return None
        answer = self._read(head.hash, "CHALLENGE_WINDOW")
        (window_s,) = self._abi.answer("CHALLENGE_WINDOW", answer)
        kept = list(epochs)[-max(1, SHARES_MOST // max(1, len(vouched))) :]
        told = self._epochs(job, kept, head.hash)
        nodes = list(vouched)
        accounts = self._accounts(job, nodes, head.hash)
        shares = self._shares(job, told, nodes, head.hash)
        clock = Clock(head.time_s, window_s)
        return PayView(
            chain_id=self._ledger.chain_id,
            contract=self._ledger.contract,
            block=head.number,
            time_s=head.time_s,
            window_s=window_s,
            first_epoch=kept[0] if kept else 0,
            tiers=TIERS,
            nodes=[
                node_tiers(
                    node,
                    accounts[node],
                    shares[node],
                    unit_price=price,
                    vouched=vouched[node],
                    clock=clock,
                )
                for node in nodes
            ],
        )

    def _unit_price(self, job: JobKey, block: bytes) -> int:
        (state,) = self._abi.answer("getJob", self._read(block, "getJob", word_bytes(job)))
        return int(state[1][4])

    def _epochs(self, job: JobKey, numbers: Sequence[int], block: bytes) -> list[ToldEpoch]:
        questions = [("getEpoch", word_bytes(job), number) for number in numbers]
        answers = self._asked(block, questions)
        return [
            ToldEpoch(number, closed_at_s)
            for number, (_, _, opened_at_s, closed_at_s, _) in zip(numbers, answers, strict=True)
            if opened_at_s or closed_at_s
        ]

    def _accounts(
        self, job: JobKey, nodes: Sequence[NodeId], block: bytes
    ) -> dict[NodeId, ToldAccount]:
        questions = [("getAccount", word_bytes(job), address_bytes(node)) for node in nodes]
        return {
            node: ToldAccount(
                counted=counted,
                earned=earned,
                paid=paid,
                pending=pending,
                release_at_s=release_at_s,
                voided=voided,
            )
            for node, (counted, _, earned, paid, pending, release_at_s, voided, _) in zip(
                nodes, self._asked(block, questions), strict=True
            )
        }

    def _shares(
        self, job: JobKey, epochs: Sequence[ToldEpoch], nodes: Sequence[NodeId], block: bytes
    ) -> dict[NodeId, list[ToldShare]]:
        places = [(node, epoch) for node in nodes for epoch in epochs]
        questions = [
            ("getContribution", word_bytes(job), epoch.number, address_bytes(node))
            for node, epoch in places
        ]
        found: dict[NodeId, list[ToldShare]] = {node: [] for node in nodes}
        answers = self._asked(block, questions)
        for (node, epoch), (state, receipts, score, reward, paid) in zip(
            places, answers, strict=True
        ):
            if receipts:
                found[node].append(ToldShare(epoch, ShareState(state), score, reward, paid))
        return found

    def _asked(
        self, block: bytes, questions: Sequence[tuple[object, ...]]
    ) -> list[tuple[int, ...]]:
        calls = [self._abi.call(str(name), *values) for name, *values in questions]
        answers = self._chain.reads(address_bytes(self._ledger.contract), calls, block)
        for answer in answers:
            if isinstance(answer, RpcRefusedError):
                raise answer
        return [
            tuple(self._abi.answer(str(name), answer)[0])
            for (name, *_), answer in zip(questions, answers, strict=True)
            if isinstance(answer, bytes)
        ]

    def _read(self, block: bytes, name: str, *values: object) -> bytes:
        contract = address_bytes(self._ledger.contract)
        return self._chain.read(contract, self._abi.call(name, *values), block)

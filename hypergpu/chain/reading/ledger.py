"""A ledger as it stands at one block, asked by name: for commands, for audits, for coordinators."""

from collections.abc import Sequence
from typing import Any

from hypergpu.chain.ledger import EpochOnChain, JobOnChain, LedgerCalls, NodeAccount, Share
from hypergpu.chain.rpc.answers import Block
from hypergpu.chain.rpc.chain import EvmChain
from hypergpu.chain.rpc.errors import RpcRefusedError
from hypergpu.ids import JobKey, NodeId
from hypergpu.ledger.audit.facts import AccountFact, ShareFact
from hypergpu.ledger.settlement.state import ShareState
from hypergpu.ledger.typed import address_bytes, word_bytes
from hypergpu.units import Wei


class LedgerReader:
    """Asks one ledger, each time as of a block; None: the newest.

    What is asked for several at once is one request, if it fits. Every method raises `RpcError`
    when there is no answer to believe, and so `RpcRefusedError` where the ledger reverts.
    """

    def __init__(self, chain: EvmChain, contract: bytes) -> None:
        self.calls = LedgerCalls()
        self._chain = chain
        self._contract = contract

    def asked(self, at: Block | None, name: str, *values: object) -> tuple[Any, ...]:
        """What a function gives."""
        (answer,) = self._answers(at, [self.calls.abi.call(name, *values)])
        return self.calls.abi.answer(name, answer)

    def window_s(self, at: Block | None = None) -> int:
        """The challenge window, which is fixed at deployment."""
        (window_s,) = self.asked(at, "CHALLENGE_WINDOW")
        return int(window_s)

    def waits_s(self, at: Block | None = None) -> tuple[int, int]:
        """The challenge window and the unbonding time, both fixed at deployment."""
        names = ("CHALLENGE_WINDOW", "UNBONDING")
        answers = self._answers(at, [self.calls.abi.call(name) for name in names])
        window_s, unbonding_s = (
            int(self.calls.abi.answer(name, answer)[0])
            for name, answer in zip(names, answers, strict=True)
        )
        return window_s, unbonding_s

    def job(self, job: JobKey, at: Block | None = None) -> JobOnChain:
        """A job."""
        (answer,) = self._answers(at, [self.calls.abi.call("getJob", word_bytes(job))])
        return self.calls.job(answer)

    def epochs(
        self, job: JobKey, numbers: Sequence[int], at: Block | None = None
    ) -> list[EpochOnChain]:
        """A job's epochs, in the order of their numbers given."""
        name = word_bytes(job)
        calls = [self.calls.abi.call("getEpoch", name, number) for number in numbers]
        return [self.calls.epoch(answer) for answer in self._answers(at, calls)]

    def shares(
        self, job: JobKey, places: Sequence[tuple[int, NodeId]], at: Block | None = None
    ) -> list[Share]:
        """Shares by epoch and node, in the order given."""
        name = word_bytes(job)
        calls = [
            self.calls.abi.call("getContribution", name, number, address_bytes(node))
            for number, node in places
        ]
        return [self.calls.share(answer) for answer in self._answers(at, calls)]

    def accounts(
        self, job: JobKey, nodes: Sequence[NodeId], at: Block | None = None
    ) -> list[NodeAccount]:
        """What nodes have in a job, in the order given."""
        name = word_bytes(job)
        calls = [self.calls.abi.call("getAccount", name, address_bytes(node)) for node in nodes]
        return [self.calls.account(answer) for answer in self._answers(at, calls)]

    def share_facts(
        self, job: JobKey, places: Sequence[tuple[int, NodeId]], at: Block
    ) -> tuple[ShareFact, ...]:
        """The shares that hold a receipt."""
        return tuple(
            ShareFact(
                epoch=number,
                node=node,
                state=ShareState(share.state),
                score=share.score,
                reward=Wei(share.reward),
                paid=Wei(share.paid),
            )
            for (number, node), share in zip(places, self.shares(job, places, at), strict=True)
            if share.receipts
        )

    def account_facts(
        self, job: JobKey, nodes: Sequence[NodeId], at: Block
    ) -> tuple[AccountFact, ...]:
        """Each node's account."""
        return tuple(
            AccountFact(
                node=node,
                counted=account.counted,
                earned=Wei(account.earned),
                paid=Wei(account.paid),
                pending=Wei(account.pending),
                release_at_s=account.release_at_s,
                voided=Wei(account.voided),
            )
            for node, account in zip(nodes, self.accounts(job, nodes, at), strict=True)
        )

    def _answers(self, at: Block | None, calls: Sequence[bytes]) -> list[bytes]:
        block = None if at is None else at.hash
        answers = []
        for answer in self._chain.reads(self._contract, calls, block):
            if isinstance(answer, RpcRefusedError):
                raise answer
            answers.append(answer)
        return answers

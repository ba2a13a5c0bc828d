"""The ledger on its chain: where it lies, what it says, and whether it is the one it should be."""

from collections.abc import Sequence
from typing import Any

from coordinator.core.settlement.epoch import Epoch
from coordinator.shell.journal.ledger.interface import Outbox
from coordinator.shell.journal.ledger.records import AccountName
from hypergpu.chain.artifacts import artifact
from hypergpu.chain.ledger import (
    CONTRACT,
    EpochOnChain,
    JobOnChain,
    LedgerCalls,
    Share,
)
from hypergpu.chain.profiles import ChainProfile
from hypergpu.chain.recognition import recognised
from hypergpu.chain.rpc.chain import EvmChain
from hypergpu.chain.rpc.errors import RpcRefusedError
from hypergpu.chain.signer import contract_address
from hypergpu.ids import Address, JobId, JobKey, NodeId
from hypergpu.ledger.typed import Domain, address_bytes, job_key, word_bytes
from hypergpu.refusal import Reason, RefusalError

DEPLOY_TOKEN = "deploy/token"
DEPLOY_LEDGER = "deploy/ledger"
_HEAD_BYTES = 64


class LedgerSite:
    """One deployed ledger as its coordinator sees it. Used by the pipeline's thread."""

    def __init__(
        self,
        chain: EvmChain,
        outbox: Outbox,
        account: AccountName,
        profile: ChainProfile,
        contract: bytes,
    ) -> None:
        self.calls = LedgerCalls()
        self.profile = profile
        self.contract = contract
        self.window_s = profile.window_s
        self.skipped_topic = self.calls.abi.topic("NodeSkipped")
        self._chain = chain
        self._outbox = outbox
        self.account = account
        self._keys: dict[JobId, JobKey] = {}

    @property
    def domain(self) -> Domain:
        """What receipts for this ledger are signed for."""
        return Domain(self.account.chain_id, Address("0x" + self.contract.hex()))

    def job_key(self, job_id: JobId) -> JobKey:
        """A job's name on the ledger, with this account as its owner."""
        if job_id not in self._keys:
            self._keys[job_id] = job_key(self.account.address, job_id)
        return self._keys[job_id]

    def is_opened(self, job_id: JobId) -> bool:
        """Whether the job's opening here is signed: what follows has later nonces."""
        return self._opened_on(job_id) == self.contract

    def why_elsewhere(self, job_id: JobId, signed_for: Domain) -> str:
        """Why a job must not be settled on this ledger; empty: it may be.

        A receipt is paid on one ledger: on the one that it is signed for. One that is signed for
        none is worth nothing to anybody but its coordinator, who settles it wherever it began to.

        Args:
            job_id: The job.
            signed_for: By its terms.
        """
        if signed_for not in {Domain(), self.domain}:
            where, fix = _named(signed_for), f"--ledger-contract {signed_for.contract}"
            return f"{job_id} is not settled: it is signed for {where}. Fix: start with {fix}"
        opened_on = self._opened_on(job_id)
        if opened_on not in {None, self.contract}:
            other = Domain(self.account.chain_id, Address(f"0x{(opened_on or b'').hex()}"))
            where, fix = _named(other), f"--ledger-contract {other.contract}"
            return f"{job_id} is not settled: it is open on {where}. Fix: start with {fix}"
        others = {batch.account for batch in self._outbox.batches(job_id)} - {self.account}
        for account in sorted(others):
            where = f"chain {account.chain_id} by {account.address}"
            return f"{job_id} is not settled: it is recorded on {where}. Fix: start with that chain"
        return ""

    def _opened_on(self, job_id: JobId) -> bytes | None:
        opening = self._outbox.transaction_for(self.account, opening_purpose(job_id))
        return None if opening is None else opening.transaction.to

    def purposes(self, prefix: str) -> tuple[str, ...]:
        """What the account has signed transactions for, as far as it begins so."""
        return self._outbox.purposes(self.account, prefix)

    def check(self) -> None:
        """See that the contract is a ledger of this version, and learn its window and token.

        Raises:
            RefusalError: LEDGER_WRONG, it is not there, or another one; CHAIN_WRONG.
            RpcError: the chain cannot be asked.
        """
        code = recognised(self._chain, self.domain)
        if not is_code_of(artifact(CONTRACT).code, code):
            where = f"0x{self.contract.hex()} on chain {self.account.chain_id}"
            raise RefusalError(
                Reason.LEDGER_WRONG,
                f"the ledger at {where} has other code than this version's",
            )
        (self.window_s,) = self._ask("CHALLENGE_WINDOW")

    def token(self) -> bytes:
        """The address of the token that the ledger pays in."""
        made_here = deployed_address(self._outbox, self.account, DEPLOY_TOKEN)
        if made_here is not None:
            return made_here
        (address,) = self._ask("TOKEN")
        return address_bytes(Address(address))

    def job(self, job_id: JobId, height: int | None = None) -> JobOnChain | None:
        """A job as it stands, or stood at a block; None: it is not open there."""
        call = self.calls.abi.call("getJob", word_bytes(self.job_key(job_id)))
        try:
            answer = self._chain.read(self.contract, call, height)
        except RpcRefusedError:
            return None
        # Empty where the ledger itself is not mined yet.
        return self.calls.job(answer) if answer else None

    def shares(self, epoch: Epoch) -> list[Share]:
        """The shares of an epoch's nodes, in their order."""
        job = word_bytes(self.job_key(epoch.job_id))
        calls = [
            self.calls.abi.call("getContribution", job, epoch.number, address_bytes(node))
            for node in epoch.nodes
        ]
        return [self.calls.share(answer) for answer in self._reads(calls)]

    def epoch(self, epoch: Epoch) -> EpochOnChain:
        """An epoch as it stands."""
        job = word_bytes(self.job_key(epoch.job_id))
        return self.calls.epoch(self._read("getEpoch", job, epoch.number))

    def epochs(self, job_id: JobId, numbers: Sequence[int], height: int) -> list[EpochOnChain]:
        """A job's epochs as they stood at a block, in the order of their numbers given."""
        job = word_bytes(self.job_key(job_id))
        calls = [self.calls.abi.call("getEpoch", job, number) for number in numbers]
        return [self.calls.epoch(answer) for answer in self._reads(calls, height)]

    def counted(self, job_id: JobId, nodes: Sequence[NodeId]) -> list[int]:
        """How many receipts of each node the ledger has recorded."""
        job = word_bytes(self.job_key(job_id))
        calls = [self.calls.abi.call("getAccount", job, address_bytes(node)) for node in nodes]
        return [self.calls.account(answer).counted for answer in self._reads(calls)]

    def _ask(self, name: str, *values: object) -> tuple[Any, ...]:
        return self.calls.abi.answer(name, self._read(name, *values))

    def _read(self, name: str, *values: object) -> bytes:
        return self._chain.read(self.contract, self.calls.abi.call(name, *values))

    def _reads(self, calls: Sequence[bytes], height: int | None = None) -> list[bytes]:
        answers = []
        for answer in self._chain.reads(self.contract, calls, height):
            if isinstance(answer, RpcRefusedError):
                raise answer
            answers.append(answer)
        return answers


def deployed_address(outbox: Outbox, account: AccountName, purpose: str) -> bytes | None:
    """Where a contract lies, or will lie, that this account makes; None before it is signed."""
    row = outbox.transaction_for(account, purpose)
    if row is None:
        return None
    return contract_address(address_bytes(account.address), row.transaction.nonce)


def _named(ledger: Domain) -> str:
    return f"the ledger {ledger.contract} of chain {ledger.chain_id}"


def opening_purpose(job_id: JobId) -> str:
    """What the transaction that opens a job is for."""
    return f"open/{job_id}"


def is_code_of(creation: bytes, runtime: bytes) -> bool:
    """Whether a contract's code is what its creation code leaves, immutable values aside.

    The compiler puts zeros where immutable values go, at most some hundred words of them.
    """
    start = creation.find(runtime[:_HEAD_BYTES])
    expected = creation[start : start + len(runtime)]
    if start < 0 or len(expected) < len(runtime):
        return False
    return all(wanted in {found, 0} for wanted, found in zip(expected, runtime, strict=True))

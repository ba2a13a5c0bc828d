"""The ledger on its chain: where it lies, what it says, and whether it is the one it should be."""

from collections.abc import Sequence

from coordinator.core.settlement.epoch import Epoch
from coordinator.shell.journal.ledger.interface import Outbox
from coordinator.shell.journal.ledger.records import AccountName, SealedTransaction
from hypergpu.chain.artifacts import artifact
from hypergpu.chain.ledger import (
    CONTRACT,
    EpochOnChain,
    JobOnChain,
    NodeAccount,
    Share,
)
from hypergpu.chain.profiles import WINDOW_S_LEAST, ChainProfile
from hypergpu.chain.reading.ledger import LedgerReader
from hypergpu.chain.recognition import recognised
from hypergpu.chain.rpc.answers import Block
from hypergpu.chain.rpc.chain import EvmChain, is_of_contract
from hypergpu.chain.rpc.errors import RpcGarbledError, RpcRefusedError
from hypergpu.chain.signer import contract_address
from hypergpu.errors import HyperGPUError, Reason
from hypergpu.ids import Address, JobId, JobKey, NodeId
from hypergpu.ledger.typed import Domain, address_bytes, job_key, word_bytes

DEPLOY_TOKEN = "deploy/token"
DEPLOY_LEDGER = "deploy/ledger"
_HEAD_BYTES = 64
_NAMED_BY = "HYPERGPU_COORDINATOR_LEDGER_CONTRACT"


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
        self._reader = LedgerReader(chain, contract)
        self.calls = self._reader.calls
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
            where, fix = _named(signed_for), f"{_NAMED_BY}={signed_for.contract}"
            return f"{job_id} is not settled: it is signed for {where}. Fix: start with {fix}"
        opened_on = self._opened_on(job_id)
        if opened_on not in {None, self.contract}:
            other = Domain(self.account.chain_id, Address(f"0x{(opened_on or b'').hex()}"))
            where, fix = _named(other), f"{_NAMED_BY}={other.contract}"
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

    def check(self, at: Block) -> None:
        """See that the contract is a ledger of this version at a block, and learn its window.

        Raises:
            HyperGPUError: LEDGER_WRONG, it is not there, or another one; CHAIN_WRONG.
            RpcError: the chain cannot be asked.
        """
        code = recognised(self._chain, self.domain, at.hash)
        if not is_code_of(artifact(CONTRACT).code, code):
            where = f"0x{self.contract.hex()} on chain {self.account.chain_id}"
            raise HyperGPUError(
                Reason.LEDGER_WRONG,
                f"the ledger at {where} has other code than this version's",
            )
        window_s = self._reader.window_s(at)
        if window_s < WINDOW_S_LEAST:
            raise RpcGarbledError(
                f"the chain's RPC says that the ledger's window is {window_s} s, which none is"
            )
        self.window_s = window_s

    def bond(self, at: Block) -> tuple[int, int]:
        """This account's bond at a block, and the least that jobs are opened on."""
        posted, *_ = self._reader.asked(at, "bondOf", address_bytes(self.account.address))
        (least,) = self._reader.asked(at, "MINIMUM_BOND")
        return int(posted), int(least)

    def token(self, at: Block | None = None) -> bytes:
        """The address of the token that the ledger pays in."""
        made_here = deployed_address(self._outbox, self.account, DEPLOY_TOKEN)
        if made_here is not None:
            return made_here
        (address,) = self._reader.asked(at, "TOKEN")
        if not int(address, 16):
            raise RpcGarbledError("the chain's RPC says that the ledger pays in no token")
        return address_bytes(Address(address))

    def job(self, job_id: JobId, at: Block | None = None) -> JobOnChain | None:
        """A job as it stands at a block, or the newest; None: it is not open there."""
        call = self.calls.abi.call("getJob", word_bytes(self.job_key(job_id)))
        (answer,) = self._chain.reads(self.contract, [call], _hash(at))
        return self._job(job_id, answer)

    def jobs(
        self, job_ids: Sequence[JobId], at: Block | None = None
    ) -> tuple[bool, dict[JobId, JobOnChain | None]]:
        """Whether the ledger is paused at a block, or the newest, and jobs as `job` has them."""
        abi = self.calls.abi
        calls = [abi.call("getJob", word_bytes(self.job_key(job_id))) for job_id in job_ids]
        paused, *answers = self._chain.reads(self.contract, [abi.call("paused"), *calls], _hash(at))
        if isinstance(paused, RpcRefusedError):
            raise paused
        found = {
            job_id: self._job(job_id, answer)
            for job_id, answer in zip(job_ids, answers, strict=True)
        }
        # Empty where the ledger itself is not mined yet.
        return bool(paused) and bool(abi.answer("paused", paused)[0]), found

    def is_opened_by(self, opening: SealedTransaction, at: Block) -> bool:
        """Whether a transaction's job is open at a block as that opens it.

        Nobody else can have opened it: its key is of this account.
        """
        if opening.job_id is None or opening.purpose != opening_purpose(opening.job_id):
            return False
        call = self.calls.abi.call("getJob", word_bytes(self.job_key(opening.job_id)))
        (answer,) = self._chain.reads(self.contract, [call], at.hash)
        if isinstance(answer, RpcRefusedError) or self._job(opening.job_id, answer) is None:
            return False
        return self.calls.is_opened_by(opening.call, answer)

    def _job(self, job_id: JobId, answer: bytes | RpcRefusedError) -> JobOnChain | None:
        if isinstance(answer, RpcRefusedError):
            if not is_of_contract(answer):
                raise answer
            return None
        job = self.calls.job(answer) if answer else None
        if job is not None and job.coordinator != self.account.address:
            raise RpcGarbledError(
                f"the chain's RPC says that {job_id} is coordinated by {job.coordinator}"
            )
        return job

    def shares(self, epoch: Epoch, at: Block) -> list[Share]:
        """The shares of an epoch's nodes at a block, in their order."""
        return self.shares_of(epoch.job_id, [(epoch.number, node) for node in epoch.nodes], at)

    def shares_of(
        self, job_id: JobId, wanted: Sequence[tuple[int, NodeId]], at: Block
    ) -> list[Share]:
        """Shares at a block, by epoch and node, in the order given: in one request, if they fit."""
        return self._reader.shares(self.job_key(job_id), wanted, at)

    def epoch(self, epoch: Epoch, at: Block | None = None) -> EpochOnChain:
        """An epoch as it stands at a block, or the newest."""
        (found,) = self.epochs(epoch.job_id, [epoch.number], at)
        return found

    def epochs(self, job_id: JobId, numbers: Sequence[int], at: Block | None) -> list[EpochOnChain]:
        """A job's epochs as they stand at a block, in the order of their numbers given."""
        return self._reader.epochs(self.job_key(job_id), numbers, at)

    def accounts(
        self, job_id: JobId, nodes: Sequence[NodeId], at: Block | None = None
    ) -> list[NodeAccount]:
        """What the ledger says of nodes in a job at a block, or the newest."""
        return self._reader.accounts(self.job_key(job_id), nodes, at)

    def counted(self, job_id: JobId, nodes: Sequence[NodeId], at: Block | None = None) -> list[int]:
        """How many receipts of each node the ledger has recorded."""
        return [account.counted for account in self.accounts(job_id, nodes, at)]

    def deep(self, head: Block) -> Block:
        """The block that everything final is in or below.

        Raises:
            RpcGarbledError: the RPC does not have it, though it has one on top.
        """
        if not self.profile.depth:
            return head
        number = max(0, head.number - self.profile.depth)
        (found,) = self._chain.blocks([number])
        if found is None:
            raise RpcGarbledError(
                f"the chain's RPC at {self._chain.where} has block {head.number} and not {number}"
            )
        return found


def _hash(at: Block | None) -> bytes | None:
    return None if at is None else at.hash


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

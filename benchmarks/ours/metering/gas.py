"""Gas of a contribution on Anvil, recorded and paid, beside a contract that stores each one."""

from collections.abc import Sequence
from pathlib import Path

from web3 import Web3
from web3.contract import Contract

from benchmarks.ours.metering.chain import connect, deploy, impersonate, mine, register_nodes
from benchmarks.ours.metering.host import (
    COORDINATOR,
    ESCROW,
    JOB,
    QUALITY_BPS,
    SAMPLES,
    UNIT_PRICE,
    node_key,
    worth_of,
)
from hypergpu.statements.domain import job_salt
from payments.shell.anvil import AnvilOptions, running_anvil

WINDOW_S = 3_600
_NAIVE_CALLS = 20


class GasLedger:
    """A ledger on a chain of its own with one open job, whose nodes have stakes."""

    def __init__(self, url: str, nodes: int) -> None:
        """Deploy everything; the coordinator is the job's owner too."""
        self.web3 = connect(url)
        self.account = self.web3.to_checksum_address(COORDINATOR.address)
        impersonate(self.web3, self.account)
        self.token = deploy(self.web3, "TestToken")
        options = (self.token.address, WINDOW_S, WINDOW_S, 1, self.account, [self.account])
        self.contract = deploy(self.web3, "TrainingLedger", options)
        self.job = open_job(self.web3, self.token, self.contract, self.account)
        keys = [node_key(number) for number in range(nodes)]
        register_nodes(self.web3, self.token, self.contract, keys)
        self.nodes = [Web3.to_checksum_address(key.address) for key in keys]

    def settle(self, epoch: int, totals: Sequence[tuple[int, int]]) -> int:
        """Record totals of the nodes, close the epoch and pay; the gas of it all."""
        entries = [
            bytes.fromhex(node[2:]) + counted.to_bytes(4, "big") + score.to_bytes(8, "big")
            for node, (counted, score) in zip(self.nodes, totals, strict=True)
        ]
        root, functions = Web3.keccak(entries[0]), self.contract.functions
        recording = functions.submitAggregate(self.job, epoch, epoch, root, entries)
        paying = functions.distributePayments(self.job, epoch, self.nodes)
        calls = (recording, paying)
        return sum(mine(self.web3, call, self.account)["gasUsed"] for call in calls)

    def missing_pay(self, receipts: int) -> int:
        """Part of the worth of so many receipts of each node that the nodes have not got."""
        balance = self.token.functions.balanceOf
        return sum(worth_of(receipts) - int(balance(node).call()) for node in self.nodes)


def open_job(web3: Web3, token: Contract, ledger: Contract, coordinator: str) -> bytes:
    """Open the job of a coordinator that is its owner too."""
    salt, word = job_salt(JOB), Web3.keccak(b"a benchmark's digest")
    terms = (coordinator, word, word, UNIT_PRICE, 2)
    mine(web3, token.functions.mint(coordinator, ESCROW), coordinator)
    mine(web3, token.functions.approve(ledger.address, ESCROW), coordinator)
    mine(web3, ledger.functions.openJob(salt, terms, ESCROW), coordinator)
    return bytes(ledger.functions.jobId(coordinator, salt).call())


def measure_batched(folder: Path, receipts: int, nodes: int = 10) -> float:
    """Gas a contribution of the second epoch: one batch, then closing and payment in one call.

    Raises:
        RuntimeError: A transaction reverted, or not everything was paid.
    """
    each = receipts // nodes
    with running_anvil(AnvilOptions(block_time_s=0), log_file=folder / "anvil.log") as anvil:
        ledger = GasLedger(anvil.url, nodes)
        used = 0
        for epoch in range(2):
            count = (epoch + 1) * each
            score = count * SAMPLES * QUALITY_BPS
            used = ledger.settle(epoch, [(count, score)] * nodes)
            if ledger.missing_pay(count):
                raise RuntimeError(f"epoch {epoch} was not paid in full")
    return used / receipts


def measure_naive(folder: Path) -> float:
    """Gas a contribution in a contract that keeps each in storage, once everybody is known."""
    with running_anvil(AnvilOptions(block_time_s=0), log_file=folder / "anvil.log") as anvil:
        web3 = connect(anvil.url)
        account, naive = web3.eth.accounts[0], deploy(web3, "NaiveLedger")
        word = bytes(31) + b"\x01"
        used = []
        for sequence in range(_NAIVE_CALLS):
            made = (account, sequence, sequence, word, word, word, 320, 1_000, 9_000)
            call = naive.functions.submitContribution(word, 0, made)
            used.append(int(mine(web3, call, account)["gasUsed"]))
    return sum(used[1:]) / (len(used) - 1)

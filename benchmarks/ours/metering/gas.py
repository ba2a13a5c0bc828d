"""Gas of a contribution on Anvil, recorded, paid or claimed by a node, beside a naive contract."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from web3 import HTTPProvider, Web3
from web3.contract import Contract

from benchmarks.ours.metering.host import (
    COORDINATOR,
    ESCROW,
    JOB,
    QUALITY_BPS,
    SAMPLES,
    UNIT_PRICE,
    JobPlan,
    node_key,
    worth_of,
)
from contracts.compile import ARTIFACTS
from hypergpu.crypto import IdentityKey, chain_form
from hypergpu.ids import Address
from hypergpu.ledger_terms import Domain, job_salt, terms_of, word_bytes
from payments.shell.anvil import AnvilOptions, running_anvil

STAKE = 10**13
_GAS_MONEY_WEI = hex(10**20)
_GAS_LIMIT = 8_000_000


def connect(url: str) -> Web3:
    """A connection to Anvil's RPC."""
    return Web3(HTTPProvider(url))


def ask_anvil(web3: Web3, method: str, *parameters: object) -> Any:
    """Call one of Anvil's own methods.

    Raises:
        RuntimeError: Anvil refused it.
    """
    answer = web3.provider.make_request(method, list(parameters))  # type: ignore[arg-type]
    if "error" in answer:
        raise RuntimeError(f"{method}: {answer['error']}")
    return answer.get("result")


def contract_at(web3: Web3, name: str, address: str) -> Contract:
    """A deployed contract."""
    artifact = json.loads((ARTIFACTS / f"{name}.json").read_bytes())
    return web3.eth.contract(address=Web3.to_checksum_address(address), abi=artifact["abi"])


def deploy(web3: Web3, name: str, *arguments: object) -> Contract:
    """Deploy a compiled contract from Anvil's own account, in a block of its own."""
    artifact = json.loads((ARTIFACTS / f"{name}.json").read_bytes())
    factory = web3.eth.contract(abi=artifact["abi"], bytecode=artifact["bytecode"])
    receipt = mine(web3, factory.constructor(*arguments), web3.eth.accounts[0])
    return contract_at(web3, name, receipt["contractAddress"])


def mine(web3: Web3, call: Any, sender: str) -> Any:
    """Put one transaction into a block of its own and return its receipt.

    Raises:
        RuntimeError: It reverted.
    """
    transaction_hash = call.transact({"from": sender, "gas": _GAS_LIMIT})
    ask_anvil(web3, "evm_mine")
    receipt = web3.eth.wait_for_transaction_receipt(transaction_hash, poll_latency=0.01)
    if receipt["status"] != 1:
        raise RuntimeError(f"a transaction of {sender} reverted: {call}")
    return receipt


def impersonate(web3: Web3, account: str) -> None:
    """Let an account send without its key, with money for gas."""
    ask_anvil(web3, "anvil_impersonateAccount", account)
    ask_anvil(web3, "anvil_setBalance", account, _GAS_MONEY_WEI)


def register_nodes(
    web3: Web3, token: Contract, ledger: Contract, keys: Sequence[IdentityKey]
) -> None:
    """Have each node mint, approve, register and stake all that it has."""
    word = Web3.keccak(b"a benchmark's node")
    for key in keys:
        node = Web3.to_checksum_address(key.address)
        impersonate(web3, node)
        mine(web3, token.functions.mint(node, STAKE), node)
        mine(web3, token.functions.approve(ledger.address, STAKE), node)
        mine(web3, ledger.functions.registerNode((word, word, 8_192), STAKE), node)


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
            bytes.fromhex(node[2:]) + count.to_bytes(4, "big") + score.to_bytes(8, "big")
            for node, (count, score) in zip(self.nodes, totals, strict=True)
        ]
        root, functions = Web3.keccak(entries[0]), self.contract.functions
        record_call = functions.submitAggregate(self.job, epoch, epoch, root, entries)
        pay_call = functions.distributePayments(self.job, epoch, self.nodes)
        calls = (record_call, pay_call)
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
        last_gas = 0
        for epoch in range(2):
            count = (epoch + 1) * each
            score = count * SAMPLES * QUALITY_BPS
            last_gas = ledger.settle(epoch, [(count, score)] * nodes)
            if ledger.missing_pay(count):
                raise RuntimeError(f"epoch {epoch} was not paid in full")
    return last_gas / receipts


def measure_naive(folder: Path) -> float:
    """Gas a contribution in a contract that keeps each in storage, once everybody is known."""
    with running_anvil(AnvilOptions(block_time_s=0), log_file=folder / "anvil.log") as anvil:
        web3 = connect(anvil.url)
        account, naive = web3.eth.accounts[0], deploy(web3, "NaiveLedger")
        word = bytes(31) + b"\x01"
        gas_amounts = []
        for sequence in range(_NAIVE_CALLS):
            contribution = (account, sequence, sequence, word, word, word, 320, 1_000, 9_000)
            call = naive.functions.submitContribution(word, 0, contribution)
            gas_amounts.append(int(mine(web3, call, account)["gasUsed"]))
    return sum(gas_amounts[1:]) / (len(gas_amounts) - 1)


_PLAN = JobPlan(rounds=20, rounds_per_epoch=10)


def measure_unpaid(folder: Path) -> int:
    """Units that the nodes' work is worth and that they did not get.

    Half of the rounds are recorded, for a quarter of their score. Nothing but the nodes' own
    transactions follows.

    Raises:
        RuntimeError: A transaction reverted.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with running_anvil(AnvilOptions(block_time_s=0), log_file=folder / "anvil.log") as anvil:
        ledger = GasLedger(anvil.url, _PLAN.nodes)
        recorded_rounds = _PLAN.rounds // 2
        ledger.settle(
            0, [(recorded_rounds, recorded_rounds * SAMPLES * QUALITY_BPS // 4)] * _PLAN.nodes
        )
        functions = ledger.contract.functions
        for key, node in zip(_PLAN.keys, ledger.nodes, strict=True):
            mine(ledger.web3, functions.submitContribution(*_newest(ledger, key), 1), node)
        ask_anvil(ledger.web3, "evm_increaseTime", WINDOW_S)
        mine(ledger.web3, functions.closeEpoch(ledger.job, 1), ledger.nodes[0])
        ask_anvil(ledger.web3, "evm_increaseTime", WINDOW_S)
        for node in ledger.nodes:
            mine(ledger.web3, functions.distributePayments(ledger.job, 1, [node]), node)
        return ledger.missing_pay(_PLAN.rounds)


def _newest(ledger: GasLedger, key: IdentityKey) -> tuple[Any, bytes, bytes]:
    """A node's newest receipt with both signatures, as the contract takes it."""
    address = Address(ledger.contract.address.lower())
    terms = terms_of(COORDINATOR.address, JOB, Domain(ledger.web3.eth.chain_id, address))
    _, measurement = _PLAN.round_row(_PLAN.rounds - 1, terms, [key])
    signed_receipt = _PLAN.receipt(measurement.updates[0], COORDINATOR, terms, _PLAN.rounds - 1)
    receipt = signed_receipt.receipt
    words = (
        *(word_bytes(receipt.job), receipt.epoch, receipt.round),
        *(ledger.web3.to_checksum_address(receipt.node), receipt.sequence),
        *(word_bytes(receipt.contribution), receipt.samples, receipt.quality_bps),
        *(word_bytes(receipt.evaluator), receipt.total_score),
    )
    own, counter = signed_receipt.contribution_signature, signed_receipt.signature
    return words, chain_form(own), chain_form(counter)

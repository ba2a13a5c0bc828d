"""Gas of a contribution on Anvil, recorded and paid, beside a contract that stores each one."""

import json
from pathlib import Path
from typing import Any

from eth_account import Account
from web3 import HTTPProvider, Web3
from web3.contract import Contract

from contracts.compile import ARTIFACTS
from payments.shell.anvil import AnvilOptions, running_anvil

_SAMPLES = 320
_QUALITY_BPS = 9_000
_UNIT_PRICE = 1_000
_ESCROW = 10**15
_STAKE = 10**13
_WINDOW_S = 3_600
_NAIVE_CALLS = 20
_GAS_LIMIT = 8_000_000


class Bench:
    """A chain whose blocks hold one transaction each, sent by whichever account is named."""

    def __init__(self, url: str) -> None:
        """Use Anvil's first account for everything but the nodes' own calls."""
        self._web3 = Web3(HTTPProvider(url))
        self.account = self._web3.eth.accounts[0]

    def deploy(self, name: str, *arguments: object) -> Contract:
        """Deploy a compiled contract."""
        artifact = json.loads((ARTIFACTS / f"{name}.json").read_bytes())
        factory = self._web3.eth.contract(abi=artifact["abi"], bytecode=artifact["bytecode"])
        receipt = self._send(factory.constructor(*arguments), self.account)
        return self._web3.eth.contract(address=receipt["contractAddress"], abi=artifact["abi"])

    def gas_used(self, call: Any, sender: str = "") -> int:
        """Send one transaction and return the gas that its receipt states.

        Raises:
            RuntimeError: it reverted.
        """
        receipt = self._send(call, sender or self.account)
        if receipt["status"] != 1:
            raise RuntimeError(f"{call.fn_name} reverted")
        return int(receipt["gasUsed"])

    def impersonate(self, address: str) -> None:
        """Let an account send without its key, with money for gas."""
        for method, *rest in (("anvil_impersonateAccount",), ("anvil_setBalance", hex(10**20))):
            self._web3.provider.make_request(method, [address, *rest])

    def _send(self, call: Any, sender: str) -> Any:
        sent = call.transact({"from": sender, "gas": _GAS_LIMIT})
        self._web3.provider.make_request("evm_mine", [])
        return self._web3.eth.wait_for_transaction_receipt(sent, poll_latency=0.01)


def measure_batched(folder: Path, receipts: int, nodes: int = 10) -> float:
    """Gas a contribution of the second epoch: one batch, then closing and payment in one call.

    The nodes have stakes and were paid for the first epoch.

    Raises:
        RuntimeError: a transaction reverted, or the ledger has other totals than the batches.
    """
    with running_anvil(AnvilOptions(block_time_s=0), log_file=folder / "anvil.log") as anvil:
        bench = Bench(anvil.url)
        token = bench.deploy("TestToken")
        options = (token.address, _WINDOW_S, _WINDOW_S, 1, bench.account, [bench.account])
        ledger = bench.deploy("TrainingLedger", options)
        job = _open_job(bench, token, ledger)
        members = [Account.from_key(n.to_bytes(32)).address for n in range(1_000, 1_000 + nodes)]
        for member in members:
            _enlist(bench, token, ledger, member)
        each = receipts // nodes
        used = [_settle(bench, ledger, job, members, epoch, each) for epoch in range(2)]
        for member in members:
            counted, score, earned = ledger.functions.getAccount(job, member).call()
            paid = token.functions.balanceOf(member).call()
            is_right = (counted, paid) == (2 * each, earned) and score == _score(2 * each)
            if not is_right:
                raise RuntimeError(f"{member} has {counted} receipts, {paid} of {earned} units")
    return used[1] / receipts


def measure_naive(folder: Path) -> float:
    """Gas a contribution in a contract that keeps each in storage, once everybody is known."""
    with running_anvil(AnvilOptions(block_time_s=0), log_file=folder / "anvil.log") as anvil:
        bench = Bench(anvil.url)
        naive = bench.deploy("NaiveLedger")
        word = bytes(31) + b"\x01"
        used = []
        for sequence in range(_NAIVE_CALLS):
            made = (bench.account, sequence, sequence, word, word, word, 320, 1_000, 9_000)
            used.append(bench.gas_used(naive.functions.submitContribution(word, 0, made)))
    return sum(used[1:]) / (len(used) - 1)


def _open_job(bench: Bench, token: Contract, ledger: Contract) -> bytes:
    word = Web3.keccak(b"a benchmark's job")
    terms = (bench.account, word, word, _UNIT_PRICE, 2)
    bench.gas_used(token.functions.mint(bench.account, _ESCROW))
    bench.gas_used(token.functions.approve(ledger.address, _ESCROW))
    bench.gas_used(ledger.functions.openJob(word, terms, _ESCROW))
    return bytes(ledger.functions.jobId(bench.account, word).call())


def _enlist(bench: Bench, token: Contract, ledger: Contract, member: str) -> None:
    """Register a node that stakes all it has."""
    word = Web3.keccak(b"a benchmark's node")
    bench.impersonate(member)
    bench.gas_used(token.functions.mint(member, _STAKE))
    bench.gas_used(token.functions.approve(ledger.address, _STAKE), member)
    bench.gas_used(ledger.functions.registerNode((word, word, 8_192), _STAKE), member)


def _settle(
    bench: Bench, ledger: Contract, job: bytes, members: list[str], epoch: int, each: int
) -> int:
    """Record one more batch of ``each`` receipts a node, close the epoch and pay; gas of it all."""
    count = (epoch + 1) * each
    totals = count.to_bytes(4) + _score(count).to_bytes(8)
    entries = [bytes.fromhex(member[2:]) + totals for member in members]
    root = Web3.keccak(totals)
    call = ledger.functions.submitAggregate(job, epoch, epoch, root, entries)
    paying = ledger.functions.distributePayments(job, epoch, members)
    return bench.gas_used(call) + bench.gas_used(paying)


def _score(receipts: int) -> int:
    return receipts * _SAMPLES * _QUALITY_BPS

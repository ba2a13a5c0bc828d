"""A chain inside this process: eth-tester with py-evm. For tests: a block for each transaction."""

import sys
from collections.abc import Callable, Sequence
from typing import Any

from hypergpu.chain.rpc.client import Call, Pace
from hypergpu.chain.rpc.errors import RpcRefusedError

_REFUSED = -32000
_REVERTED = 3
_UNKNOWN_METHOD = -32601


class InProcessRpc:
    """Speaks as an RPC does, with a chain that begins here and ends with this object."""

    where = "eth-tester"
    pace = Pace()

    def __init__(self, chain_id: int) -> None:
        """Start the chain: about 0.3 s.

        Args:
            chain_id: That its transactions must name; py-evm's own is 131277322940537.
        """
        # py-evm raises the limit so far that text nested without end would overflow the C stack.
        depth_max = sys.getrecursionlimit()
        from eth_tester import EthereumTester, PyEVMBackend

        self._tester = EthereumTester(PyEVMBackend())
        sys.setrecursionlimit(depth_max)
        self._chain_id = chain_id
        self._methods: dict[str, Callable[..., object]] = {
            "eth_chainId": lambda: hex(self._chain_id),
            "eth_getBlockByNumber": self._block,
            "eth_getTransactionReceipt": self._receipt,
            "eth_getTransactionCount": lambda who, _at: hex(self._tester.get_nonce(who)),
            "eth_getBalance": lambda who, _at: hex(self._tester.get_balance(who)),
            "eth_getCode": lambda who, _at: self._tester.get_code(who),
            "eth_maxPriorityFeePerGas": lambda: hex(10**9),
            "eth_call": self._called,
            "eth_sendRawTransaction": self._tester.send_raw_transaction,
            "anvil_setBalance": self._fill,
            "evm_mine": self._tester.mine_block,
            "evm_increaseTime": self._pass_time,
        }

    def call(self, call: Call) -> object:
        outcome = self._outcome(call)
        if isinstance(outcome, RpcRefusedError):
            raise outcome
        return outcome

    def batch(self, calls: Sequence[Call]) -> list[object | RpcRefusedError]:
        return [self._outcome(call) for call in calls]

    def wait(self, _seconds: float) -> None:
        """It never asks for fewer calls."""

    def close(self) -> None:
        """Nothing is held."""

    def _outcome(self, call: Call) -> object | RpcRefusedError:
        from eth.exceptions import PyEVMError
        from eth_tester.exceptions import TransactionFailed
        from eth_utils.exceptions import ValidationError

        method = self._methods.get(call.method)
        if method is None:
            return RpcRefusedError(call.method, _UNKNOWN_METHOD, "there is no such method")
        try:
            return method(*call.parameters)
        except TransactionFailed as reverted:
            said = f"execution reverted: {reverted}"
            return RpcRefusedError(call.method, _REVERTED, said[:200])
        except (PyEVMError, ValidationError) as refused:
            return RpcRefusedError(call.method, _REFUSED, str(refused)[:200])

    def _block(self, number: str, _full: object) -> object:
        from eth_tester.exceptions import BlockNotFound

        try:
            block = self._tester.get_block_by_number(
                number if number == "latest" else int(number, 16)
            )
        except BlockNotFound:
            return None
        return {
            "number": hex(block["number"]),
            "hash": block["hash"],
            "parentHash": block["parent_hash"],
            "timestamp": hex(block["timestamp"]),
            "baseFeePerGas": hex(block["base_fee_per_gas"]),
            "gasLimit": hex(block["gas_limit"]),
            "transactions": list(block["transactions"]),
        }

    def _receipt(self, name: str) -> object:
        from eth_tester.exceptions import TransactionNotFound

        try:
            receipt = self._tester.get_transaction_receipt(name)
        except TransactionNotFound:
            return None
        if receipt["block_hash"] is None:
            return None
        return {
            "transactionHash": receipt["transaction_hash"],
            "blockNumber": hex(receipt["block_number"]),
            "blockHash": receipt["block_hash"],
            "status": hex(receipt["status"]),
            "gasUsed": hex(receipt["gas_used"]),
            "contractAddress": receipt["contract_address"],
            "logs": [
                {"address": log["address"], "topics": list(log["topics"]), "data": log["data"]}
                for log in receipt["logs"]
            ],
        }

    def _called(self, asked: dict[str, Any], _at: object, *_stand_in: object) -> object:
        sender = self._tester.get_accounts()[0]
        return self._tester.call({"from": sender, **asked, "gas": 10_000_000, "gas_price": 10**12})

    def _fill(self, who: str, amount: str) -> None:
        """Give an account what the first of the chain's own can spare."""
        owner = self._tester.get_accounts()[0]
        spare = self._tester.get_balance(owner) // 10
        self._tester.send_transaction(
            {
                "from": owner,
                "to": who,
                "value": min(int(amount, 16), spare),
                "gas": 21_000,
                "max_fee_per_gas": 10**12,
                "max_priority_fee_per_gas": 10**9,
            }
        )

    def _pass_time(self, seconds: int) -> None:
        block = self._tester.get_block_by_number("latest")
        self._tester.time_travel(block["timestamp"] + seconds)

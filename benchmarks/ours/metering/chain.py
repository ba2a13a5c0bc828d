"""Anvil as benchmarks use it: web3, and nodes that stake."""

import json
from collections.abc import Sequence
from typing import Any

from web3 import HTTPProvider, Web3
from web3.contract import Contract

from contracts.compile import ARTIFACTS
from hypergpu.keys.signature import IdentityKey

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
    made = mine(web3, factory.constructor(*arguments), web3.eth.accounts[0])
    return contract_at(web3, name, made["contractAddress"])


def mine(web3: Web3, call: Any, sender: str) -> Any:
    """Put one transaction into a block of its own and return its receipt.

    Raises:
        RuntimeError: It reverted.
    """
    sent = call.transact({"from": sender, "gas": _GAS_LIMIT})
    ask_anvil(web3, "evm_mine")
    receipt = web3.eth.wait_for_transaction_receipt(sent, poll_latency=0.01)
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

"""A chain's JSON-RPC: blocks, receipts, views of contracts at one block, and sending.

Every failure to get an answer is a `ChainUnreachableError`: nothing is known, the next tick asks
again. The RPC's address is never shown whole, since its path or query may hold a key. Compiled
contracts are committed under ``contracts/artifacts`` and lie in ``payments/compiled`` in a wheel;
calls are encoded by web3's codec: `encode_abi` of its contract class takes twenty times as long.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from aiohttp import ClientError, ClientTimeout
from eth_abi.exceptions import DecodingError
from eth_utils.abi import (
    abi_to_signature,
    function_signature_to_4byte_selector,
    get_abi_input_types,
    get_abi_output_types,
)
from eth_utils.address import to_checksum_address
from web3 import AsyncHTTPProvider, AsyncWeb3
from web3.exceptions import ContractLogicError, Web3Exception
from web3.providers.rpc.utils import ExceptionRetryConfiguration
from web3.types import Nonce, RPCEndpoint
from web3.utils.address import get_create_address

from hypergpu.errors import HyperGPUError, Reason
from hypergpu.ids import Address
from payments.core.transactions import Inclusion
from payments.shell.chains import CallRefusedError, ChainProfile, ChainUnreachableError, display_url

LEDGER = "TrainingLedger"
TOKEN = "TestToken"
_FOLDERS = (
    Path(__file__).parents[1] / "compiled",
    Path(__file__).parents[2] / "contracts" / "artifacts",
)
_SELECTOR_BYTES = 4
_BUILT_IN_ERRORS: tuple[Any, ...] = (
    {"type": "error", "name": "Error", "inputs": [{"name": "reason", "type": "string"}]},
    {"type": "error", "name": "Panic", "inputs": [{"name": "code", "type": "uint256"}]},
)
_codec = AsyncWeb3().codec


class Contract:
    """Encodes calls to a compiled contract and decodes its answers, events and errors."""

    def __init__(self, name: str) -> None:
        artifact = _read_artifact(name)
        self.abi: list[Any] = artifact["abi"]
        self._code = bytes.fromhex(artifact["bytecode"][2:])
        self._functions = {each["name"]: each for each in self.abi if each["type"] == "function"}
        errors = [*_BUILT_IN_ERRORS, *(each for each in self.abi if each["type"] == "error")]
        self._errors = {_selector(each): each for each in errors}
        self._selectors = {each: _selector(self._functions[each]) for each in self._functions}
        self._inputs: dict[str, list[str]] = {
            each: get_abi_input_types(self._functions[each]) for each in self._functions
        }

    def encode(self, function: str, *arguments: object) -> bytes:
        """Data of a call. Addresses are ``0x`` text or 20 bytes; structs are tuples."""
        return self._selectors[function] + _codec.encode(self._inputs[function], arguments)

    def encode_creation(self, *arguments: object) -> bytes:
        """Data of the transaction that creates the contract."""
        constructors = [each for each in self.abi if each["type"] == "constructor"]
        types = [kind for each in constructors for kind in get_abi_input_types(each)]
        return self._code + _codec.encode(types, arguments)

    def decode(self, function: str, answer: bytes) -> Any:
        """The answer of a view: a mapping where it is one struct, else a value or a tuple.

        Raises:
            ValueError: The bytes are no such answer, as from an address without the contract.
        """
        function_abi = self._functions[function]
        try:
            values = _codec.decode(get_abi_output_types(function_abi), answer)
        except DecodingError as error:
            raise ValueError(f"{function} was answered with {len(answer)} odd bytes") from error
        return (
            _struct_mapping(function_abi["outputs"][0], values[0]) if len(values) == 1 else values
        )

    def describe_error(self, answer: bytes) -> str:
        """A revert in words: the contract's error with its arguments."""
        error_abi = self._errors.get(answer[:_SELECTOR_BYTES])
        if error_abi is None:
            return f"0x{answer.hex()}" if answer else "no reason given"
        try:
            values = _codec.decode(get_abi_input_types(error_abi), answer[_SELECTOR_BYTES:])
        except DecodingError:
            return f"0x{answer.hex()}"
        if error_abi["name"] == "Error":
            return str(values[0])
        return f"{error_abi['name']}({', '.join(map(_text, values))})"


@cache
def ledger_contract() -> Contract:
    """The training ledger."""
    return Contract(LEDGER)


@cache
def token_contract() -> Contract:
    """The test token; its ERC-20 part serves any token."""
    return Contract(TOKEN)


def created_address(sender: Address, nonce: int) -> Address:
    """Address of the contract that an account creates with a transaction."""
    return Address(get_create_address(to_checksum_address(sender), Nonce(nonce)).lower())


def _selector(abi: Any) -> bytes:
    return function_signature_to_4byte_selector(abi_to_signature(abi))


def _struct_mapping(output: Mapping[str, Any], value: Any) -> Any:
    """A struct as a mapping by the names of its fields, nested ones too."""
    if output["type"] != "tuple":
        return value
    fields: Sequence[Mapping[str, Any]] = output["components"]
    return {
        each["name"]: _struct_mapping(each, part) for each, part in zip(fields, value, strict=True)
    }


def _text(value: object) -> str:
    return f"0x{value.hex()}" if isinstance(value, bytes) else str(value)


def _read_artifact(name: str) -> dict[str, Any]:
    for folder in _FOLDERS:
        path = folder / f"{name}.json"
        if path.is_file():
            artifact: dict[str, Any] = json.loads(path.read_bytes())
            return artifact
    raise HyperGPUError(
        Reason.FILE_UNUSABLE,
        f"the compiled contract {name} is not installed",
        fix="in a clone: make contracts; else install hypergpu again",
    )


_TIMEOUT_S = 15.0
_CONNECT_S = 5.0
_RETRIES = 3
_HAS_ALREADY = ("already", "nonce too low")
_RpcRequest = tuple[str, list[Any]]


class ChainBlock(NamedTuple):
    """A block's header."""

    number: int
    hash: bytes
    parent: bytes
    time_s: int
    base_fee_wei: int


class ContractView(NamedTuple):
    """A read of a contract."""

    contract: Contract
    address: Address
    function: str
    arguments: tuple[Any, ...] = ()


class Ethereum:
    """One RPC. Used on one event loop."""

    def __init__(self, url: str, profile: ChainProfile | None = None) -> None:
        """Connect to nothing yet.

        Args:
            url: Address of the RPC.
            profile: States how many calls the RPC takes in one request; None: one.
        """
        self._url = url
        self._batch_max = profile.batch_max if profile else 1
        timeout = ClientTimeout(total=_TIMEOUT_S, connect=_CONNECT_S)
        retry = ExceptionRetryConfiguration(errors=(ClientError, TimeoutError), retries=_RETRIES)
        self._provider = AsyncHTTPProvider(
            url, request_kwargs={"timeout": timeout}, exception_retry_configuration=retry
        )
        self.web3 = AsyncWeb3(self._provider)

    @property
    def where(self) -> str:
        """The RPC's host, without secrets."""
        return display_url(self._url)

    async def close(self) -> None:
        """Close the connections."""
        await self._provider.disconnect()

    async def chain_id(self) -> int:
        """Chain that the RPC is of."""
        return int(await self.ask("eth_chainId"), 16)

    async def head(self) -> ChainBlock:
        """The newest block."""
        block = await self.block("latest")
        if block is None:
            raise ChainUnreachableError(f"the chain's RPC at {self.where} has no newest block")
        return block

    async def block(self, height: int | str) -> ChainBlock | None:
        """The block at a height; None where the RPC does not have it."""
        at = hex(height) if isinstance(height, int) else height
        answer = await self.ask("eth_getBlockByNumber", at, False)
        try:
            return answer and ChainBlock(
                number=int(answer["number"], 16),
                hash=_octets(answer["hash"]),
                parent=_octets(answer["parentHash"]),
                time_s=int(answer["timestamp"], 16),
                base_fee_wei=int(answer.get("baseFeePerGas") or "0x0", 16),
            )
        except (KeyError, TypeError, ValueError) as odd:
            raise ChainUnreachableError(f"the chain's RPC gave an odd block: {odd}") from None

    async def next_nonce(self, account: Address, height: int | None = None) -> int:
        """Transactions of an account up to a block, or up to the newest."""
        at = "latest" if height is None else hex(height)
        return int(await self.ask("eth_getTransactionCount", account, at), 16)

    async def balance_wei(self, account: Address) -> int:
        """The account's money for gas."""
        return int(await self.ask("eth_getBalance", account, "latest"), 16)

    async def code(self, address: Address) -> bytes:
        """A contract's code; empty: there is none."""
        return _octets(await self.ask("eth_getCode", address, "latest"))

    async def inclusions(self, hashes: Sequence[bytes]) -> dict[bytes, Inclusion]:
        """Places of transactions by hash, without those in no block as far as the RPC knows."""
        requests = [("eth_getTransactionReceipt", ["0x" + each.hex()]) for each in hashes]
        answers = await self.ask_all(requests)
        return {
            name: Inclusion(name, int(receipt["blockNumber"], 16), int(receipt["status"], 16) == 1)
            for name, receipt in zip(hashes, map(_raise_if_refused, answers), strict=True)
            if receipt and receipt.get("blockHash")
        }

    async def read(
        self, views: Sequence[ContractView], block: ChainBlock | None = None
    ) -> list[Any]:
        """Views of contracts, all at one block; None for a view that the contract refused.

        Raises:
            ChainUnreachableError: The RPC does not answer, or not at this block.
        """
        at = "latest" if block is None else hex(block.number)
        requests: list[_RpcRequest] = []
        for view in views:
            calldata = view.contract.encode(view.function, *view.arguments)
            requests.append(("eth_call", [{"to": view.address, "data": "0x" + calldata.hex()}, at]))
        answers = await self.ask_all(requests)
        return [_view_result(view, answer) for view, answer in zip(views, answers, strict=True)]

    async def send(self, raws: Sequence[bytes]) -> list[str]:
        """Send signed transactions. For each the RPC's complaint; empty: it took the transaction.

        A transaction that the RPC or the chain has already is no complaint.
        """
        requests = [("eth_sendRawTransaction", ["0x" + raw.hex()]) for raw in raws]
        answers = await self.ask_all(requests)
        complaints = [str(each) if isinstance(each, CallRefusedError) else "" for each in answers]
        return [
            "" if any(has in each.lower() for has in _HAS_ALREADY) else each for each in complaints
        ]

    async def revert_reason(self, contract: Contract, transaction: bytes, block: int) -> str:
        """Why a transaction reverted: it is called again on top of the block before its own."""
        transaction_body = await self.ask("eth_getTransactionByHash", "0x" + transaction.hex())
        if not isinstance(transaction_body, dict):
            return "no reason given"
        call = {
            name: transaction_body[name]
            for name in ("from", "to", "gas")
            if transaction_body.get(name)
        }
        call["data"] = transaction_body.get("input", "0x")
        (answer,) = await self.ask_all([("eth_call", [call, hex(max(0, block - 1))])])
        if isinstance(answer, CallRefusedError):
            return contract.describe_error(answer.revert) if answer.revert else str(answer)
        return "it ran out of gas, or the block's earlier transactions made it fail"

    async def ask(self, method: str, *parameters: Any) -> Any:
        """One call.

        Raises:
            CallRefusedError: The RPC refused it.
            ChainUnreachableError: The RPC does not answer.
        """
        (answer,) = await self.ask_all([(method, list(parameters))])
        return _raise_if_refused(answer)

    async def ask_all(self, requests: Sequence[_RpcRequest]) -> list[Any]:
        """Several calls in as few requests as the RPC takes; a refused one gives its error."""
        results: list[Any] = []
        for start in range(0, len(requests), self._batch_max):
            chunk = [
                (RPCEndpoint(method), parameters)
                for method, parameters in requests[start : start + self._batch_max]
            ]
            with self.guard():
                if len(chunk) == 1:
                    answers: Any = [await self._provider.make_request(*chunk[0])]
                else:
                    answers = await self._provider.make_batch_request(chunk)
            if not isinstance(answers, list) or len(answers) != len(chunk):
                detail = f"refused {len(chunk)} calls in one request"
                raise ChainUnreachableError(f"the chain's RPC at {self.where} {detail}")
            results.extend(map(_result, answers))
        return results

    @contextmanager
    def guard(self) -> Iterator[None]:
        """Turn the errors of the connection into `ChainUnreachableError`, but no contract's."""
        try:
            yield
        except (ClientError, TimeoutError, OSError) as away:
            failure_text = f"{type(away).__name__}: {away}".replace(self._url, self.where)
            failure_text = failure_text.split("url=")[0].rstrip(", ")
            raise ChainUnreachableError(
                f"the chain's RPC at {self.where} does not answer: {failure_text}"
            ) from None
        except ContractLogicError:
            raise
        except (Web3Exception, ValueError) as odd:
            raise ChainUnreachableError(
                f"the chain's RPC at {self.where} answered as no chain does: {type(odd).__name__}"
            ) from None


def _result(answer: Any) -> Any:
    """The result of an answer, or the error that it holds."""
    if not isinstance(answer, dict):
        raise ChainUnreachableError("the chain's RPC answered as no chain does")
    if not (error := answer.get("error")):
        return answer.get("result")
    if isinstance(error, str):
        return CallRefusedError(error)
    revert = str(error.get("data") or "")
    words = _octets(revert) if revert.startswith("0x") else b""
    return CallRefusedError(str(error.get("message", "")), int(error.get("code", 0)), words)


def _raise_if_refused(result: Any) -> Any:
    if isinstance(result, CallRefusedError):
        raise result
    return result


def _view_result(view: ContractView, answer: Any) -> Any:
    if isinstance(answer, CallRefusedError):
        if answer.is_revert:
            return None
        raise ChainUnreachableError(f"the chain's RPC did not call {view.function}: {answer}")
    try:
        return view.contract.decode(view.function, _octets(answer))
    except ValueError as odd:
        raise ChainUnreachableError(str(odd)) from None


def _octets(found: str) -> bytes:
    return bytes.fromhex(found[2:])

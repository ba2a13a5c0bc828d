"""A chain's JSON-RPC: blocks, receipts, views of contracts at one block, and sending.

Every failure to get an answer is a `ChainUnreachableError`: nothing is known, the next tick asks
again. The RPC's address is never shown whole, since its path or query may hold a key.
"""

from collections.abc import Awaitable, Sequence
from typing import Any, NamedTuple

import rlp
from aiohttp import ClientError, ClientTimeout
from web3 import AsyncHTTPProvider, AsyncWeb3
from web3.exceptions import Web3Exception
from web3.providers.rpc.utils import ExceptionRetryConfiguration
from web3.types import RPCEndpoint

from hypergpu.ids import Address
from hypergpu.keys.keccak import keccak
from hypergpu.keys.signature import IdentityKey
from payments.shell.chain_errors import CallRefusedError, ChainUnreachableError
from payments.shell.chains import ChainProfile, display_url
from payments.shell.contracts import Contract

_TIMEOUT_S = 15.0
_CONNECT_S = 5.0
_RETRIES = 3
_EIP1559 = b"\x02"


class Block(NamedTuple):
    """A block's header."""

    number: int
    hash: bytes
    parent: bytes
    time_s: int
    base_fee_wei: int


class MinedPlace(NamedTuple):
    """A transaction's place on the chain."""

    block_number: int
    block_hash: bytes
    is_success: bool
    gas_used: int


class View(NamedTuple):
    """A read of a contract."""

    contract: Contract
    address: Address
    function: str
    arguments: tuple[Any, ...] = ()


class Draft(NamedTuple):
    """An EIP-1559 transaction before it is signed."""

    chain_id: int
    nonce: int
    to: bytes
    """20 bytes; empty: it creates a contract."""
    data: bytes
    gas: int
    max_fee_wei: int
    tip_wei: int


class SignedTransaction(NamedTuple):
    """Bytes to send, and the transaction's name on the chain."""

    hash: bytes
    raw: bytes


_HAS_ALREADY = ("already", "nonce too low")
Request = tuple[str, list[Any]]


def sign_transaction(key: IdentityKey, draft: Draft) -> SignedTransaction:
    """Sign a transaction, the same bytes each time. A fifth of eth-account's time (0.08 ms)."""
    numbers = draft.chain_id, draft.nonce, draft.tip_wei, draft.max_fee_wei, draft.gas
    fields: list[Any] = [*map(_number_bytes, numbers), draft.to, b"", draft.data, []]
    signature = key.sign_digest(keccak(_EIP1559 + rlp.encode(fields, infer_serializer=False)))
    signed = [signature[64:], signature[:32], signature[32:64]]
    fields += [part.lstrip(b"\0") for part in signed]
    raw = _EIP1559 + rlp.encode(fields, infer_serializer=False)
    return SignedTransaction(keccak(raw), raw)


def read_transaction(raw: bytes) -> Draft:
    """The draft of a signed transaction."""
    chain_id, nonce, tip, fee, gas, to, _, calldata, *_ = rlp.decode(raw[1:])
    numbers = [int.from_bytes(each, "big") for each in (chain_id, nonce, gas, fee, tip)]
    return Draft(numbers[0], numbers[1], bytes(to), bytes(calldata), *numbers[2:])


class Ethereum:
    """One RPC. Used on one event loop."""

    def __init__(self, url: str, batch_max: int = 1) -> None:
        """Connect to nothing yet."""
        self._url = url
        self._batch_max = batch_max
        timeout = ClientTimeout(total=_TIMEOUT_S, connect=_CONNECT_S)
        retry = ExceptionRetryConfiguration(errors=(ClientError, TimeoutError), retries=_RETRIES)
        provider = AsyncHTTPProvider(
            url, request_kwargs={"timeout": timeout}, exception_retry_configuration=retry
        )
        self._provider = AsyncWeb3(provider).provider

    @classmethod
    def of(cls, url: str, profile: ChainProfile) -> "Ethereum":
        """With as many calls a request as the chain's RPC takes."""
        return cls(url, profile.batch_max)

    @property
    def where(self) -> str:
        """The RPC's host, without secrets."""
        return display_url(self._url)

    async def close(self) -> None:
        """Close the connections."""
        await self._provider.disconnect()

    async def chain_id(self) -> int:
        """Chain that the RPC is of."""
        return _number(await self.ask("eth_chainId"))

    async def head(self) -> Block:
        """The newest block."""
        found = _block(await self.ask("eth_getBlockByNumber", "latest", False))
        if found is None:
            raise ChainUnreachableError(f"the chain's RPC at {self.where} has no newest block")
        return found

    async def blocks(self, numbers: Sequence[int]) -> list[Block | None]:
        """Blocks by height; None for a height that the RPC does not have."""
        requests = [("eth_getBlockByNumber", [hex(number), False]) for number in numbers]
        return [_block(_unless_refused(each)) for each in await self.ask_all(requests)]

    async def next_nonce(self, account: Address, block: Block | None = None) -> int:
        """Transactions of an account up to a block, or up to the newest."""
        at = "latest" if block is None else hex(block.number)
        return _number(await self.ask("eth_getTransactionCount", account, at))

    async def balance_wei(self, account: Address) -> int:
        """The account's money for gas."""
        return _number(await self.ask("eth_getBalance", account, "latest"))

    async def code(self, address: Address) -> bytes:
        """A contract's code; empty: there is none."""
        return _octets(await self.ask("eth_getCode", address, "latest"))

    async def inclusions(self, hashes: Sequence[bytes]) -> list[MinedPlace | None]:
        """Places of transactions; None for one in no block, as far as the RPC knows."""
        requests = [("eth_getTransactionReceipt", ["0x" + each.hex()]) for each in hashes]
        return [_inclusion(_unless_refused(each)) for each in await self.ask_all(requests)]

    async def read(self, views: Sequence[View], block: Block | None = None) -> list[Any]:
        """Views of contracts, all at one block; None for a view that the contract refused.

        Raises:
            ChainUnreachableError: The RPC does not answer, or not at this block.
        """
        at = "latest" if block is None else hex(block.number)
        requests: list[Request] = []
        for view in views:
            calldata = view.contract.encode(view.function, *view.arguments)
            requests.append(("eth_call", [{"to": view.address, "data": "0x" + calldata.hex()}, at]))
        answers = await self.ask_all(requests)
        return [_decoded(view, answer) for view, answer in zip(views, answers, strict=True)]

    async def send(self, raws: Sequence[bytes]) -> list[str]:
        """Send signed transactions. For each the RPC's complaint; empty: it took the transaction.

        A transaction that the RPC or the chain has already is no complaint.
        """
        requests = [("eth_sendRawTransaction", ["0x" + raw.hex()]) for raw in raws]
        return [_complaint(each) for each in await self.ask_all(requests)]

    async def revert_reason(self, contract: Contract, transaction: bytes, block: int) -> str:
        """Why a transaction reverted: it is called again on top of the block before its own."""
        found = await self.ask("eth_getTransactionByHash", "0x" + transaction.hex())
        if not isinstance(found, dict):
            return "no reason given"
        call = {name: found[name] for name in ("from", "to", "input", "gas") if found.get(name)}
        call["data"] = call.pop("input", "0x")
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
        answer = await self._guarded(
            self._provider.make_request(RPCEndpoint(method), list(parameters))
        )
        return _raise_if_refused(_result(answer))

    async def ask_all(self, requests: Sequence[Request]) -> list[Any]:
        """Several calls in as few requests as the RPC takes; a refused one gives its error."""
        if self._batch_max == 1:
            return [await self._ask_alone(each) for each in requests]
        chunks = [
            requests[start : start + self._batch_max]
            for start in range(0, len(requests), self._batch_max)
        ]
        return [each for chunk in chunks for each in await self._ask_chunk(chunk)]

    async def _ask_alone(self, request: Request) -> Any:
        method, parameters = request
        return _result(
            await self._guarded(self._provider.make_request(RPCEndpoint(method), parameters))
        )

    async def _ask_chunk(self, chunk: Sequence[Request]) -> list[Any]:
        batch = [(RPCEndpoint(method), parameters) for method, parameters in chunk]
        answers = await self._guarded(self._provider.make_batch_request(batch))
        if not isinstance(answers, list) or len(answers) != len(chunk):
            raise ChainUnreachableError(
                f"the chain's RPC at {self.where} refused {len(chunk)} calls in one request"
            )
        return [_result(each) for each in answers]

    async def _guarded(self, answer: Awaitable[Any]) -> Any:
        try:
            return await answer
        except (ClientError, TimeoutError, OSError) as away:
            said = f"{type(away).__name__}: {away}".replace(self._url, self.where)
            said = said.split("url=")[0].rstrip(", ")
            raise ChainUnreachableError(
                f"the chain's RPC at {self.where} does not answer: {said}"
            ) from None
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
    revert = error.get("data")
    is_hex = isinstance(revert, str) and revert.startswith("0x")
    words = _octets(revert) if is_hex else b""
    return CallRefusedError(str(error.get("message", "")), int(error.get("code", 0)), words)


def _raise_if_refused(result: Any) -> Any:
    if isinstance(result, CallRefusedError):
        raise result
    return result


def _unless_refused(result: Any) -> Any:
    """A refused look-up is an unanswered one: some RPCs say so of a block that they lack."""
    if isinstance(result, CallRefusedError):
        raise ChainUnreachableError(f"the chain's RPC refused to look something up: {result}")
    return result


def _decoded(view: View, answer: Any) -> Any:
    if isinstance(answer, CallRefusedError):
        if answer.is_revert:
            return None
        raise ChainUnreachableError(f"the chain's RPC did not call {view.function}: {answer}")
    try:
        return view.contract.decode(view.function, _octets(answer))
    except ValueError as odd:
        raise ChainUnreachableError(str(odd)) from None


def _complaint(result: Any) -> str:
    if not isinstance(result, CallRefusedError):
        return ""
    said = str(result)
    return "" if any(words in said.lower() for words in _HAS_ALREADY) else said


def _block(found: Any) -> Block | None:
    if found is None:
        return None
    try:
        return Block(
            number=_number(found["number"]),
            hash=_octets(found["hash"]),
            parent=_octets(found["parentHash"]),
            time_s=_number(found["timestamp"]),
            base_fee_wei=_number(found.get("baseFeePerGas") or 0),
        )
    except (KeyError, TypeError, AttributeError) as odd:
        raise ChainUnreachableError(f"the chain's RPC gave an odd block: {odd}") from None


def _inclusion(found: Any) -> MinedPlace | None:
    if found is None or found.get("blockHash") is None:
        return None
    return MinedPlace(
        block_number=_number(found["blockNumber"]),
        block_hash=_octets(found["blockHash"]),
        is_success=_number(found["status"]) == 1,
        gas_used=_number(found["gasUsed"]),
    )


def _number(found: Any) -> int:
    return found if isinstance(found, int) else int(str(found), 16)


def _number_bytes(number: int) -> bytes:
    return number.to_bytes((number.bit_length() + 7) // 8, "big")


def _octets(found: Any) -> bytes:
    return bytes(found) if isinstance(found, bytes | bytearray) else bytes.fromhex(str(found)[2:])

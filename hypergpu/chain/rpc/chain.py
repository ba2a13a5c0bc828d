"""What the pipeline asks of a chain, in its own words."""

from collections.abc import Sequence
from enum import Enum
from typing import NamedTuple

from hypergpu.chain.rpc.answers import (
    HASH_BYTES,
    Block,
    Inclusion,
    block,
    inclusion,
    octets,
    quantity,
)
from hypergpu.chain.rpc.client import Call, Rpc
from hypergpu.chain.rpc.errors import RpcGarbledError, RpcRefusedError


class Reception(Enum):
    """How a chain took a transaction that it was sent. None of them says that it will be mined."""

    TAKEN = "taken"
    KNOWN = "known already"
    NONCE_USED = "its nonce is used"
    FEE_TOO_LOW = "its fee is too low"
    UNFUNDED = "the account cannot pay for it"
    POOL_FULL = "the chain's pool is full"
    REFUSED = "refused"


class Sent(NamedTuple):
    """A reception in the chain's own words."""

    reception: Reception
    words: str = ""


# Clients have no codes for these. Lower case; the first that occurs in the message counts.
_RECEPTIONS = (
    ("already imported", Reception.KNOWN),  # Anvil
    ("already known", Reception.KNOWN),  # geth, reth, op-geth
    ("alreadyknown", Reception.KNOWN),  # Nethermind
    ("known transaction", Reception.KNOWN),  # Besu, older geth
    ("already exists", Reception.KNOWN),  # Erigon's and Monad's pools
    ("nonce too low", Reception.NONCE_USED),
    ("invalid nonce", Reception.NONCE_USED),
    ("nonce is too low", Reception.NONCE_USED),
    ("oldnonce", Reception.NONCE_USED),  # Nethermind
    ("underpriced", Reception.FEE_TOO_LOW),  # also "replacement transaction underpriced"
    ("less than block base fee", Reception.FEE_TOO_LOW),
    ("fee cap", Reception.FEE_TOO_LOW),
    ("fee too low", Reception.FEE_TOO_LOW),
    ("feetoolow", Reception.FEE_TOO_LOW),  # Nethermind
    ("insufficient funds", Reception.UNFUNDED),
    ("insufficient balance", Reception.UNFUNDED),
    ("txpool is full", Reception.POOL_FULL),
    ("pool is full", Reception.POOL_FULL),
)


REVERTED = 3
"""The code of an RPC for what a contract refused."""
_FAILED_WORDS = ("revert", "opcode", "out of gas")


def is_of_contract(refused: RpcRefusedError) -> bool:
    """Whether a call was refused by the contract, and not for a block that the RPC has not."""
    words = refused.message.lower()
    return refused.code == REVERTED or any(each in words for each in _FAILED_WORDS)


class EvmChain:
    """One chain through one RPC.

    Every method raises `RpcError` when there is no answer that can be believed.
    """

    def __init__(self, rpc: Rpc) -> None:
        self.rpc = rpc
        self.where = rpc.where

    def chain_id(self) -> int:
        """Which chain it is."""
        return quantity(self.rpc.call(Call("eth_chainId")))

    def head(self) -> Block:
        """Its newest block."""
        return block(self.rpc.call(Call("eth_getBlockByNumber", ("latest", False))))

    def blocks(self, numbers: Sequence[int]) -> list[Block | None]:
        """Blocks by number as they are now; None where it does not reach that far."""
        calls = [Call("eth_getBlockByNumber", (hex(number), False)) for number in numbers]
        return [
            None if answer is None else block(answer, number)
            for number, answer in zip(numbers, self._answers(calls), strict=True)
        ]

    def inclusions(self, hashes: Sequence[bytes]) -> list[Inclusion | None]:
        """Where transactions lie. None: ask again, it need not mean that one is not mined.

        A failure stops its caller for good, so it is believed only if it is said twice.
        """
        found = self._inclusions(hashes)
        failed = [one for one in found if one is not None and not one.is_success]
        again = self._inclusions([one.hash for one in failed])
        for one, other in zip(failed, again, strict=True):
            if other != one:
                raise RpcGarbledError(
                    f"the chain's RPC at {self.where} says that transaction 0x{one.hash.hex()}"
                    f" failed in block {one.block_number}, and in its next answer something else"
                )
        return found

    def _inclusions(self, hashes: Sequence[bytes]) -> list[Inclusion | None]:
        calls = [Call("eth_getTransactionReceipt", (_hex(each),)) for each in hashes]
        return [
            None if answer is None else inclusion(answer, each)
            for each, answer in zip(hashes, self._answers(calls), strict=True)
        ]

    def next_nonce(self, address: bytes, height: int | None = None) -> int:
        """How many transactions of the account there are, up to the newest block or another."""
        block = "latest" if height is None else hex(height)
        return quantity(self.rpc.call(Call("eth_getTransactionCount", (_hex(address), block))))

    def balance_wei(self, address: bytes) -> int:
        """What the account has for gas."""
        return quantity(self.rpc.call(Call("eth_getBalance", (_hex(address), "latest"))))

    def code(self, address: bytes, block: bytes | None = None) -> bytes:
        """A contract's code; empty where there is none. ``block`` as for `read`."""
        return octets(self.rpc.call(Call("eth_getCode", (_hex(address), block_asked(block)))))

    def tip_wei(self) -> int:
        """The tip that the chain suggests; 0 where it has no opinion."""
        try:
            return quantity(self.rpc.call(Call("eth_maxPriorityFeePerGas")))
        except RpcRefusedError:
            return 0

    def read(self, contract: bytes, call: bytes, block: bytes | None = None) -> bytes:
        """What a contract answers to a call that changes nothing.

        Args:
            contract: Its address.
            call: Function and values.
            block: Hash of the block that it is asked at (EIP-1898), which a replica that is behind
                does not know; None: the newest, by whichever replica answers.

        Raises:
            RpcRefusedError: it reverted, or the RPC does not know the block, or knows another one
                at its height.
        """
        asked = {"to": _hex(contract), "data": _hex(call)}
        return octets(self.rpc.call(Call("eth_call", (asked, block_asked(block)))))

    def reads(
        self, contract: bytes, calls: Sequence[bytes], block: bytes | None = None
    ) -> list[bytes | RpcRefusedError]:
        """Several as `read`, at once; one that reverted is given back as its refusal."""
        at = block_asked(block)
        asked = [
            Call("eth_call", ({"to": _hex(contract), "data": _hex(each)}, at)) for each in calls
        ]
        return [
            answer if isinstance(answer, RpcRefusedError) else octets(answer)
            for answer in self.rpc.batch(asked)
        ]

    def send(self, transactions: Sequence[tuple[bytes, bytes]]) -> list[Sent]:
        """Hand over signed transactions, in order.

        Args:
            transactions: Each one's hash and its raw bytes.

        Raises:
            RpcGarbledError: it took one under another name than its own.
        """
        calls = [Call("eth_sendRawTransaction", (_hex(raw),)) for _, raw in transactions]
        answers = self.rpc.batch(calls)
        return [
            _reception(answer, name)
            for (name, _), answer in zip(transactions, answers, strict=True)
        ]

    def _answers(self, calls: Sequence[Call]) -> list[object]:
        answers = self.rpc.batch(calls)
        for answer in answers:
            if isinstance(answer, RpcRefusedError):
                raise answer
        return answers


def _reception(answer: object, name: bytes) -> Sent:
    if not isinstance(answer, RpcRefusedError):
        taken = octets(answer, HASH_BYTES)
        if taken != name:
            raise RpcGarbledError(
                f"the chain's RPC took transaction 0x{name.hex()} and calls it 0x{taken.hex()}"
            )
        return Sent(Reception.TAKEN)
    words = answer.message.lower()
    for text, reception in _RECEPTIONS:
        if text in words:
            return Sent(reception, answer.message)
    return Sent(Reception.REFUSED, answer.message)


def block_asked(block: bytes | None) -> str | dict[str, object]:
    """How an RPC is asked about a block by its hash (EIP-1898); None: the newest."""
    return "latest" if block is None else {"blockHash": _hex(block), "requireCanonical": True}


def _hex(content: bytes) -> str:
    return "0x" + content.hex()

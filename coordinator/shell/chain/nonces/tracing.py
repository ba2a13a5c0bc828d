"""Finds the block in which a nonce was used, to see whether a transaction of ours has used it."""

from enum import Enum
from typing import NamedTuple

from coordinator.shell.journal.ledger.records import OutboxRow
from hypergpu.chain.rpc.answers import Block
from hypergpu.chain.rpc.chain import EvmChain
from hypergpu.chain.rpc.errors import RpcGarbledError, RpcRefusedError


class Whose(Enum):
    """Who has used a nonce."""

    OURS = "ours"
    OTHERS = "others"
    UNKNOWN = "unknown"


class Trace(NamedTuple):
    """Who has used a nonce, and how that is known."""

    whose: Whose
    words: str


class NonceTracer:
    """Looks into blocks, for an RPC may lack the receipt of what is in one. Used by one thread."""

    def __init__(self, chain: EvmChain, address: bytes) -> None:
        self._chain = chain
        self._address = address
        self._seen: dict[int, Block] = {}

    def trace(self, row: OutboxRow, head: Block) -> Trace:
        """Who has used a transaction's nonce; unknown where the RPC has no state of old blocks.

        Args:
            row: The transaction, of which no receipt is known.
            head: The newest block.

        Raises:
            RpcError: the chain cannot be asked, or contradicts itself.
        """
        try:
            block = self._used_in(row.transaction.nonce, head)
        except RpcRefusedError as refused:
            return Trace(Whose.UNKNOWN, f"the block that used it was not looked for, as {refused}")
        for each in row.attempts:
            if each.attempt.hash in block.transactions:
                name = f"0x{each.attempt.hash.hex()}"
                words = (
                    f"block {block.number} holds it as {name}, and the chain's RPC at"
                    f" {self._chain.where} does not give its receipt. Fix: name one that does"
                )
                return Trace(Whose.OURS, words)
        return Trace(Whose.OTHERS, f"block {block.number} has used it, and does not hold this")

    def _used_in(self, nonce: int, head: Block) -> Block:
        before = self._seen.get(nonce)
        number = self._number(nonce, head.number) if before is None else before.number
        (block,) = self._chain.blocks([number])
        if block is None or (before is not None and block.hash != before.hash):
            self._seen.pop(nonce, None)
            raise RpcGarbledError(
                f"the chain's RPC at {self._chain.where} has another block {number} than before"
            )
        self._seen[nonce] = block
        return block

    def _number(self, nonce: int, newest: int) -> int:
        """Of the first block behind which the nonce is used; near ones first, which RPCs keep."""
        low = high = newest
        step = 1
        while low and self._used(low) > nonce:
            high, low, step = low, max(0, low - step), step * 2
        while high - low > 1:
            middle = (low + high) // 2
            if self._used(middle) > nonce:
                high = middle
            else:
                low = middle
        if not self._used(max(0, high - 1)) <= nonce < self._used(high):
            raise RpcGarbledError(
                f"the chain's RPC at {self._chain.where} counts the transactions up to block"
                f" {high} differently from one answer to the next"
            )
        return high

    def _used(self, height: int) -> int:
        return self._chain.next_nonce(self._address, height)

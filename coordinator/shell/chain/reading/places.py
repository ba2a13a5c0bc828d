"""Where the transactions of an outbox lie, by the chain as it was when a turn first asked."""

from coordinator.core.settlement.sending import (
    Attempt,
    BlockName,
    Found,
    TransactionState,
    is_undone,
)
from coordinator.shell.chain.turns import Collected
from coordinator.shell.journal.ledger.records import OutboxRow
from hypergpu.chain.rpc.answers import Inclusion
from hypergpu.chain.rpc.chain import EvmChain
from hypergpu.chain.rpc.errors import RpcGarbledError


class Places:
    """Used by the pump. What it looks at it notes in the turn, and nowhere else."""

    def __init__(self, chain: EvmChain) -> None:
        self._chain = chain

    def found(
        self, turn: Collected, rows: tuple[OutboxRow, ...], next_nonce: int
    ) -> dict[int, Found]:
        """Where the transactions lie now, by nonce.

        One in a block that is still there needs no receipt again, and one whose nonce is not used
        has none.

        Raises:
            RpcError: the chain cannot be asked, or contradicts itself.
        """
        self._look_at(turn, {row.block.number for row in rows if row.block and _is_mined(row)})
        found: dict[int, Found] = {}
        asked: list[tuple[int, Attempt]] = []
        for row in rows:
            nonce, block = row.transaction.nonce, row.block
            if _is_mined(row) and block and turn.canonical_hash(block.number) == block.hash:
                found[nonce] = Found(block, is_success=True, hash=row.mined_hash)
            elif nonce < next_nonce:
                asked += [(nonce, each.attempt) for each in row.attempts]
        places = self._chain.inclusions([attempt.hash for _, attempt in asked])
        self._look_at(turn, {place.block_number for place in places if place is not None})
        for (nonce, attempt), place in zip(asked, places, strict=True):
            if place is not None:
                self._check_place(turn, place)
                block = BlockName(place.block_number, place.block_hash)
                is_success = place.is_success and not attempt.is_void
                found[nonce] = Found(block, is_success, attempt.hash)
                is_ahead = block.number > turn.head.number
                turn.events += () if is_ahead else place.events
        return found

    def undone(self, turn: Collected, finals: tuple[OutboxRow, ...]) -> list[OutboxRow]:
        """Those of final transactions that a reorganisation has taken out of their blocks.

        Raises:
            RpcError: the chain cannot be asked.
        """
        self._look_at(turn, {row.block.number for row in finals if row.block})
        return [
            row
            for row in finals
            if row.block
            and is_undone(row.block, turn.head.number, turn.canonical_hash(row.block.number))
        ]

    def _check_place(self, turn: Collected, place: Inclusion) -> None:
        block = turn.blocks.get(place.block_number)
        is_same = block is not None and block.hash == place.block_hash
        if block is not None and is_same and place.hash not in block.transactions:
            raise RpcGarbledError(
                f"the chain's RPC at {self._chain.where} says that transaction "
                f"0x{place.hash.hex()} is in block {block.number}, which does not hold it"
            )

    def _look_at(self, turn: Collected, numbers: set[int]) -> None:
        wanted = sorted(numbers - turn.blocks.keys())
        found = self._chain.blocks(wanted)
        turn.blocks |= {block.number: block for block in found if block is not None}


def _is_mined(row: OutboxRow) -> bool:
    return row.state is TransactionState.MINED

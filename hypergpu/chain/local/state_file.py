"""A local chain's state in a file that is whole at every instant, for a chain that may be killed.

Anvil writes its own state file in place and while it makes blocks: a kill leaves half a file now
and then, or the nonce of a transaction without the transaction. Here the state is asked for between
two blocks, and takes the file's place at once.
"""

import gzip
import time
import zlib
from collections.abc import Callable
from pathlib import Path

from hypergpu.chain.rpc.answers import Block, octets
from hypergpu.chain.rpc.chain import EvmChain
from hypergpu.chain.rpc.client import Call, HttpRpc
from hypergpu.chain.rpc.errors import RpcGarbledError
from hypergpu.chain.rpc.transport import HttpTransport
from hypergpu.files import write_durably

_ANSWER_BYTES_MAX = 1 << 30
_WITHIN_S = 60.0
_TRIES = 4
"""How often a state is asked for that no block falls into; the last one is taken as it is."""
_REST_TIMES = 2
_REST_TIMES_EMPTY = 20
"""Keeping a state takes 20 us for each block of the chain: at most a third of a core while there
are transactions, and a twentieth while there are none."""


class StateKeeper:
    """Keeps the state of one chain in one file. Used by one thread."""

    def __init__(self, url: str, file: Path, now_s: Callable[[], float] = time.monotonic) -> None:
        """Ask nothing yet.

        Args:
            url: RPC of an Anvil.
            file: What `AnvilOptions.begins_with` takes; its folder is there.
            now_s: The time.
        """
        transport = HttpTransport(url, timeout_s=_WITHIN_S, answer_bytes_max=_ANSWER_BYTES_MAX)
        self._chain = EvmChain(HttpRpc(transport))
        self._file = file
        self._now_s = now_s
        self._seen: Block | None = None
        self._kept = b""
        self._has_transactions = False
        self._kept_at_s = 0.0
        self._took_s = 0.0

    def look(self) -> None:
        """Keep the state if a block has come since, unless keeping it would take too much time.

        Raises:
            RpcError: the chain does not answer.
            OSError: the file cannot be written.
        """
        head = self._chain.head()
        if self._seen is None or head.hash != self._seen.hash:
            # Where blocks came that nobody looked at, there may have been some.
            is_next = self._seen is not None and head.parent == self._seen.hash
            self._has_transactions |= bool(head.transactions) or not is_next
            self._seen = head
        times = _REST_TIMES if self._has_transactions else _REST_TIMES_EMPTY
        if head.hash != self._kept and self._now_s() >= self._kept_at_s + times * self._took_s:
            self.keep()

    def keep(self) -> None:
        """Keep the state as it is now.

        Raises:
            RpcError: the chain does not answer.
            OSError: the file cannot be written.
        """
        began_s = self._now_s()
        head, state = self._state()
        write_durably(self._file, state)
        self._seen, self._kept, self._has_transactions = head, head.hash, False
        self._kept_at_s = self._now_s()
        self._took_s = self._kept_at_s - began_s

    def close(self) -> None:
        """Let go of the connection."""
        self._chain.rpc.close()

    def _state(self) -> tuple[Block, bytes]:
        head = self._chain.head()
        answer: object = ""
        for _ in range(_TRIES):
            before = head
            answer = self._chain.rpc.call(Call("anvil_dumpState"))
            head = self._chain.head()
            if head.hash == before.hash:
                break
        try:
            return head, gzip.decompress(octets(answer))
        except (EOFError, OSError, zlib.error) as wrong:
            raise RpcGarbledError(f"the state of {self._chain.where} is none: {wrong}") from None
